"""The block that replaces every block with changed wiring, in all families."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vitcompress.errors import UnsupportedModelError

Part = nn.Module | nn.Parameter | None  # of a block: a module, a parameter that multiplies, or nothing
SITE_PARTS = {"attention": "attn", "ffn": "mlp"}  # kind of a site -> the name of this child of a block


@dataclass(frozen=True)
class Wiring:
    """The residual branches of a block, in order: each reads the sum that the branch before it wrote.

    branches: each a chain of names of child modules, and of parameters that multiply (a LayerScale that is no module).
    takes_arguments: children that receive the extra arguments of the block, for example an attention mask.
    parts(block): children, by name, to use instead of those of the block, if the block itself does a part of the
        child's work (shift and window partition in Swin) or has no child of this name.
    """

    branches: tuple[tuple[str, ...], ...]
    takes_arguments: frozenset[str] = frozenset()
    parts: Callable[[nn.Module], Mapping[str, Part]] = lambda block: {}


def move_hooks(old: nn.Module, new: nn.Module) -> nn.Module:
    """Register the forward and backward hooks of a user on `new`, which replaces `old`, and return it."""
    for name, hooks in vars(old).items():
        if name.startswith(("_forward_", "_backward_")):
            vars(new)[name].update(hooks)
    vars(new)["_is_full_backward_hook"] = old._is_full_backward_hook
    return new


def reject_new_size(*args: object, **kwargs: object) -> None:
    """The `set_input_size` of pruned models whose position tables and windows fit one size only."""
    reason = "its windows, shifts and tables belong to the size that it was pruned for"
    hint = "prune it at the other size, as in --set 'model.args.img_size=[256, 192]'"
    raise UnsupportedModelError(f"the input size of a pruned model cannot be changed: {reason}", hint=hint)


def branches_of(block: nn.Module, wiring: Wiring) -> tuple[tuple[str, ...], ...]:
    """The current residual branches of `block`, in order, each a chain of child names."""
    return block.branches if isinstance(block, EditedBlock) else wiring.branches


def has_output_act(block: nn.Module) -> bool:
    """Whether an activation follows the last residual sum of `block`."""
    return isinstance(block, EditedBlock) and block.output_act is not None


class EditedBlock(nn.Module):
    """Residual branches in order, x <- x + chain(x), then an optional output activation.

    A chain applies children in order; a parameter in a chain multiplies. An empty chain doubles the stream
    (x <- x + x), as in the released NOSE models. Modules and parameters keep timm's names.
    """

    def __init__(self, parts: Mapping[str, Part], wiring: Wiring) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                self.register_parameter(name, part)
        self.branches = wiring.branches
        self.takes_arguments = wiring.takes_arguments
        self.output_act: nn.Module | None = None

    @classmethod
    def of(cls, block: nn.Module, wiring: Wiring) -> "EditedBlock":
        """`block` itself if it is an edited block, else an edited block that computes the same."""
        if isinstance(block, cls):
            return block
        parts = {name: getattr(block, name, None) for branch in wiring.branches for name in branch}
        return cls({**parts, **wiring.parts(block)}, wiring)

    def rewire(self, part: str, replacement: str) -> None:
        """Replace `part` as `Plan.removed` says (`drop`: no branch, `double`: an empty one); delete unused children."""
        branches: list[tuple[str, ...]] = []
        for branch in self.branches:
            if part not in branch:
                branches.append(branch)
            elif replacement != "drop":  # norm and LayerScale stay
                branches.append(() if replacement == "double" else tuple(name for name in branch if name != part))
        self.branches = tuple(branches)
        used = {name for branch in self.branches for name in branch}
        for name in [n for n in (*self._modules, *self._parameters) if n not in used and n != "output_act"]:
            delattr(self, name)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x: tokens, (batch, tokens, channels). The other arguments are those that timm passes to the block."""
        for branch in self.branches:
            y = x
            for name in branch:
                part = getattr(self, name)
                if isinstance(part, nn.Module):
                    y = part(y, *args, **kwargs) if name in self.takes_arguments else part(y)
                elif part is not None:  # a parameter, or what replaces it in torch.func.functional_call and torch.fx
                    y = y * part
            x = x + y
        return x if self.output_act is None else self.output_act(x)
