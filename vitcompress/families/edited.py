"""The one block that stands wherever a block's wiring was changed, in every family."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vitcompress.families.anatomy import Wiring


class EditedBlock(nn.Module):
    """Residual branches in order, each a chain of children: x <- x + chain(x); then an optional output activation.

    An empty chain doubles the stream (x <- x + x), which is what the released NOSE models do. Children keep timm's
    names, so parameter names do not change.
    """

    def __init__(self, children: Mapping[str, nn.Module], wiring: Wiring) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self.branches = wiring.branches
        self.takes_arguments = wiring.takes_arguments
        self.output_act: nn.Module | None = None

    @classmethod
    def of(cls, block: nn.Module, wiring: Wiring) -> "EditedBlock":
        """`block` itself if it is edited already, else an edited block that computes the same."""
        return block if isinstance(block, cls) else cls(wiring.parts(block), wiring)

    def rewire(self, part: str, chain: tuple[str, ...] | None) -> None:
        """Give the branch that runs `part` another chain (None: no branch) and drop the children left unused."""
        branches = [chain if part in branch else branch for branch in self.branches]
        self.branches = tuple(branch for branch in branches if branch is not None)
        used = {name for branch in self.branches for name in branch}
        for name in [n for n, _ in self.named_children() if n not in used and n != "output_act"]:
            delattr(self, name)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to compute, so that the block can go."""
        return not self.branches and self.output_act is None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x: tokens, (batch, tokens, channels); the other arguments are what timm passes to the block."""
        for branch in self.branches:
            y = x
            for name in branch:
                child = getattr(self, name)
                y = child(y, *args, **kwargs) if name in self.takes_arguments else child(y)
            x = x + y
        return x if self.output_act is None else self.output_act(x)
