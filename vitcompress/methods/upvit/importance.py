"""Importance of each channel: the change of the outputs when this channel alone is deleted.

    S(c) = sum over proxy images of KL(softmax(z) || softmax(z without c))

UP-ViT (https://arxiv.org/abs/2111.15127). z: logits of the model before the step, at temperature 1. Channels are
deleted, which differs from setting them to zero at LayerNorms. What a deletion cannot change is computed once:
everything before the first affected block comes from one plain pass, and a hidden channel of an FFN changes the block's
output by the product of its activation and its column of the last layer. Logarithms are taken in float64, and rounding
below zero is clamped.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitcompress.families import Family, Space, scale_parameter
from vitcompress.families.edited_block import SITE_PARTS, branches_of, has_output_act
from vitcompress.plan import enclosing_module
from vitcompress.surgery.masks import delete_channels, deleting_axes
from vitcompress.training.loaders import EvalLoader
from vitcompress.training.metrics import kl_divergence

ROUNDS = 8  # iterations for the v_i
Output = tuple[str, Tensor]  # path and output of a block


@dataclass(frozen=True)
class Component:
    """Spaces of equal size that are pruned together, channel by channel: q, k and v of an attention, or one space."""

    name: str
    kind: str
    spaces: tuple[Space, ...]

    @property
    def size(self) -> int:
        return self.spaces[0].size


def components(spaces: Sequence[Space]) -> tuple[Component, ...]:
    """The components of a model: residual streams, attentions, FFNs, spatial reductions."""
    parts: dict[tuple[str, str], list[Space]] = {}
    for space in spaces:
        key = (space.attention, "attention") if space.kind in ("qk", "v") else (space.name, space.kind)
        parts.setdefault(key, []).append(space)
    return tuple(Component(name, kind, tuple(own)) for (name, kind), own in parts.items())


def divergence(logits: Tensor, changed: Tensor) -> Tensor:
    """`kl_divergence`, summed over images: (images, classes) and (groups x images, classes) -> (groups,)."""
    return kl_divergence(logits, changed.reshape(-1, *logits.shape)).sum(-1)


class _Replay(nn.Module):
    """Replaces a block: returns the known output `out`, or its input if that is None."""

    def __init__(self, out: Tensor | None = None) -> None:
        super().__init__()
        self.out = out

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x if self.out is None else self.out


class Importance:
    """Scores of a model's components on the images of a loader. The model is not changed."""

    def __init__(self, model: nn.Module, family: Family, *, images_at_once: int) -> None:
        self.model, self.family, self.images_at_once = model.eval(), family, images_at_once
        self.blocks = list(family.blocks(model))
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def scores(self, component: Component, loader: EvalLoader, only: Sequence[int] | None = None) -> Tensor:
        """S of each channel of `component` over the images of this process: (channels,), float64.

        only: the channels to measure; the others get 0. None: all.
        """
        wanted = torch.tensor(range(component.size) if only is None else only, dtype=torch.long)
        total = torch.zeros(component.size, dtype=torch.float64)
        reader = self._last_linear(component)
        for images, _ in loader:
            logits, start, hidden = self._plain(images, component, after=reader is not None)
            step = max(1, self.images_at_once // len(images))
            for channels in torch.split(wanted, step):
                if reader and start:
                    changed = self._without_hidden(reader, channels.to(self.device), images, start, hidden)
                else:
                    gate = 1 - nn.functional.one_hot(channels.to(self.device), component.size).to(images.dtype)
                    with delete_channels(self.model, dict.fromkeys(component.spaces, gate)):
                        changed = self._rest(len(channels), images, start)
                total[channels] += divergence(logits, changed).cpu()
        return total

    def _plain(self, images: Tensor, component: Component, *, after: bool) -> tuple[Tensor, Output | None, Tensor]:
        """One pass without deletions: logits, a block with its output, the input of the first layer on `component`.

        The block is the last one that finished before this layer; with `after`, the one that contains the layer.
        """
        own = enclosing_module(component.name, self.blocks) if after else None
        start: Output | None = None
        inputs: list[Tensor] = []

        def finish(path: str, block: nn.Module, args: Any, out: Tensor) -> None:
            nonlocal start
            if not inputs or path == own:
                start = path, out

        def read(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            if not inputs:
                inputs.append(args[0])

        with ExitStack() as stack:
            for path in self.blocks:
                stack.callback(self.model.get_submodule(path).register_forward_hook(partial(finish, path)).remove)
            for axis in (axis for space in component.spaces for axis in deleting_axes(self.model, space)):
                stack.callback(self.model.get_submodule(axis.owner).register_forward_pre_hook(read).remove)
            logits = self.model(images)
        return logits, start, inputs[0]

    def _without_hidden(self, reader: str, channels: Tensor, images: Tensor, block: Output, hidden: Tensor) -> Tensor:
        """Logits without each of these channels of `hidden`, the input of `reader`: (channels x images, classes)."""
        path, out = block
        columns = self.model.get_parameter(f"{reader}.weight")[:, channels].T  # (channels, width)
        for scale in (scale for scale, layer in self.family.scales(self.model).items() if layer == reader):
            columns = columns * scale_parameter(self.model, scale)
        change = hidden[..., channels].movedim(-1, 0).unsqueeze(-1) * columns[:, None, None, :]
        return self._rest(len(channels), images, (path, (out - change).flatten(0, 1)), repeated=True)

    def _rest(self, groups: int, images: Tensor, start: Output | None, *, repeated: bool = False) -> Tensor:
        """The forward pass after the block `start`, whose output is known, for `groups` copies of the images."""
        replacements: dict[str, nn.Module] = {}
        if start is not None:
            path, out = start
            replacements = {before: _Replay() for before in self.blocks[: self.blocks.index(path)]}
            replacements[path] = _Replay(out if repeated else out.repeat(groups, 1, 1))
        with ExitStack() as stack:
            for path, module in replacements.items():
                stack.callback(self.model.set_submodule, path, self.model.get_submodule(path))
                self.model.set_submodule(path, module)
            return cast(Tensor, self.model(images.repeat(groups, 1, 1, 1)))

    def _last_linear(self, component: Component) -> str | None:
        """The linear layer that reads an FFN's hidden channels, if it is the last operation of its block."""
        if component.kind != "mlp":
            return None
        axes, path = deleting_axes(self.model, component.spaces[0]), enclosing_module(component.name, self.blocks)
        if path is None or len(axes) > 1:  # a norm in between depends on all channels
            return None
        block = self.model.get_submodule(path)
        ends_block = SITE_PARTS["ffn"] in branches_of(block, self.family.wiring)[-1] and not has_output_act(block)
        return axes[0].owner if ends_block else None


def estimates(
    model: nn.Module, components: Sequence[Component], loader: EvalLoader, *, directions: int
) -> dict[str, Tensor]:
    """Component -> estimates of S for its channels over the images of this process: (channels,), float64.

    The curvature of KL at the dense model. With a gate g_c on each channel, KL(softmax(z) || softmax(z(g))) and its
    gradient are zero at g = 1. To second order (Gauss-Newton), the deletion of a channel costs

        S(c) ~ 1/2 sum over images of j_c^T F j_c,    j_c = dz / dg_c,    F = diag(q) - q q^T (Fisher information)

    F = B B^T with B = diag(sqrt q) - q sqrt(q)^T. With the singular directions v_i of B, largest first, j^T F j is the
    sum of all (j^T B v_i)^2, one backward pass each for all channels of all components. Few classes share almost all of
    an image's q, so one or two directions suffice to rank channels, where random signs would need more passes.

    A channel of an attention adds a product to q k, and a gate on both factors would count its deletion twice; the
    gates of q and k are therefore the square root of the channel's gate.

    directions: number of v_i, and so of backward passes per image. One less than there are classes gives all of
        j^T F j, fewer give a lower bound.
    """
    total = {c.name: torch.zeros(c.size, dtype=torch.float64) for c in components}
    for images, _ in loader:
        gates = {c.name: images.new_ones(len(images), c.size).requires_grad_() for c in components}
        masks = {s: gates[c.name].sqrt() if s.kind == "qk" else gates[c.name] for c in components for s in c.spaces}
        with torch.enable_grad(), delete_channels(model.eval(), masks):
            logits = model(images)
        for direction in _directions(logits.detach(), directions):
            slopes = torch.autograd.grad(logits, list(gates.values()), direction, retain_graph=True)
            for name, gradient in zip(gates, slopes, strict=True):
                total[name] += gradient.double().square().sum(dim=0).cpu() / 2
    return total


def _directions(logits: Tensor, count: int) -> Iterator[Tensor]:
    """B v_i for the first `count` directions, at most one less than there are classes: (images, classes) each.

    By orthogonal iteration on B^T B, from the most probable classes on.
    """
    q = torch.softmax(logits.double(), dim=-1).cpu().unsqueeze(-1)
    root, count = q.sqrt(), min(count, q.shape[1] - 1)
    v = torch.zeros(*q.shape[:2], count, dtype=q.dtype).scatter_(1, q.topk(count, dim=1).indices.mT, 1.0)
    for _ in range(ROUNDS):
        out = _times(q, root, v)
        v = torch.linalg.qr(root * (out - (q * out).sum(dim=1, keepdim=True)))[0]
    for direction in _times(q, root, v).unbind(dim=-1):
        yield direction.to(logits)


def _times(q: Tensor, root: Tensor, v: Tensor) -> Tensor:
    """B v, for columns v: (images, classes, columns)."""
    return root * v - q * (root * v).sum(dim=1, keepdim=True)
