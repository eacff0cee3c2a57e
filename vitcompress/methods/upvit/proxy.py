"""A cheap estimate of S(c): the curvature of KL at the dense model. It is called a screen, not a score.

With a gate g_c on each channel, KL(softmax(z) || softmax(z(g))) and its gradient are zero at g = 1. To second order
(Gauss-Newton), the deletion of a channel costs

    S(c) ~ 1/2 sum over images of j_c^T F j_c,    j_c = dz / dg_c,   F = diag(q) - q q^T (Fisher information of softmax)

F = B B^T with B = diag(sqrt q) - q sqrt(q)^T. With the singular directions v_i of B, largest first, j^T F j is the
sum of all (j^T B v_i)^2, one backward pass each for all channels of all components. Few classes share almost all of an
image's q, so one or two directions suffice to rank channels, where random signs would need more passes.

A channel of an attention adds a product to q k, and a gate on both factors would count its deletion twice; the gates of
q and k are therefore the square root of the channel's gate.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from vitcompress.methods.upvit.importance import Component
from vitcompress.surgery.masks import delete_channels
from vitcompress.training.loaders import EvalLoader

ROUNDS = 8  # iterations for the v_i


def estimates(
    model: nn.Module, components: Sequence[Component], loader: EvalLoader, *, directions: int
) -> dict[str, Tensor]:
    """Component -> estimates for its channels over the images of this process: (channels,), float64.

    directions: number of v_i, and so of backward passes per image. One less than there are classes gives all of
        j^T F j, fewer give a lower bound.
    """
    total = {c.name: torch.zeros(c.size, dtype=torch.float64) for c in components}
    spaces = [space for component in components for space in component.spaces]
    for batch, _ in loader:
        images = batch.to(next(model.parameters()).dtype)
        gates = {c.name: images.new_ones(len(images), c.size).requires_grad_() for c in components}
        by_space = {
            s.name: gates[c.name].sqrt() if s.kind == "qk" else gates[c.name] for c in components for s in c.spaces
        }
        with torch.enable_grad(), delete_channels(model.eval(), spaces, by_space):
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
