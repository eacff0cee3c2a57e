"""A model whose parameters want no gradients for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def frozen(model: nn.Module) -> Iterator[nn.Module]:
    """`model` while none of its parameters requires gradients; afterwards the same ones do again.

    Even without gradients, a view of a parameter is said to require them, as that of a pool's latent is. torch's
    ModuleTracker asks such a view for a gradient function, which it does not have, when a module is given it.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield model
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
