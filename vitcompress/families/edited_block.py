"""The one block that replaces every block whose wiring was changed, in all families."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vitcompress.errors import UnsupportedModelError
from vitcompress.families.base import Part, Wiring


def fixed_size() -> UnsupportedModelError:
    """The error for asking a pruned model to take images of another size."""
    return UnsupportedModelError(
        "the input size of a model whose blocks were edited cannot be changed: windows, shifts and tables are those of "
        "the size it was pruned for (by now this model is changed in part: load it again)",
        hint="prune it at the other size, as in --set 'model.args.img_size=[256, 192]'",
    )


def branches_of(block: nn.Module, wiring: Wiring) -> tuple[tuple[str, ...], ...]:
    """The residual branches of `block` as it is wired now, in order, each a chain of child names."""
    return block.branches if isinstance(block, EditedBlock) else wiring.branches


def has_output_act(block: nn.Module) -> bool:
    """Whether an activation follows the last residual sum of `block`."""
    return isinstance(block, EditedBlock) and block.output_act is not None


class EditedBlock(nn.Module):
    """Residual branches in order, each a chain of children: x <- x + chain(x); then an optional output activation.

    A parameter in a chain multiplies. An empty chain doubles the stream (x <- x + x), which is what the released NOSE
    models do. Modules and parameters keep timm's names, so names do not change.
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
        """`block` itself if it is edited already, else an edited block that computes the same."""
        return block if isinstance(block, cls) else cls(wiring.parts(block), wiring)

    def rewire(self, part: str, chain: tuple[str, ...] | None) -> None:
        """Give the branch that runs `part` another chain (None: no branch) and drop what is left unused."""
        branches = [chain if part in branch else branch for branch in self.branches]
        self.branches = tuple(branch for branch in branches if branch is not None)
        used = {name for branch in self.branches for name in branch}
        for name in [n for n in (*self._modules, *self._parameters) if n not in used and n != "output_act"]:
            delattr(self, name)

    def set_input_size(self, *args: Any, **kwargs: Any) -> None:
        """What timm's Swin asks of each block. Raises UnsupportedModelError: windows and shifts stay as they are."""
        raise fixed_size()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to compute, so that the block can go."""
        return not self.branches and self.output_act is None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x: tokens, (batch, tokens, channels); the other arguments are what timm passes to the block."""
        for branch in self.branches:
            y = x
            for name in branch:
                part = getattr(self, name)
                if isinstance(part, nn.Parameter):
                    y = y * part
                elif part is not None:
                    y = part(y, *args, **kwargs) if name in self.takes_arguments else part(y)
            x = x + y
        return x if self.output_act is None else self.output_act(x)
