"""Elementary edits of a module tree."""

from typing import Any

from torch import nn


def replace_module(model: nn.Module, path: str, new: nn.Module) -> None:
    """Replace the module at `path` by `new`, which gets the mode (training or evaluation) of the old module."""
    parent, _, leaf = path.rpartition(".")
    new.training = model.get_submodule(path).training
    setattr(model.get_submodule(parent), leaf, new)


def drop_scale(model: nn.Module, path: str) -> None:
    """Remove the LayerScale at `path`, a module or a parameter."""
    parent, _, leaf = path.rpartition(".")
    owner = model.get_submodule(parent)
    if isinstance(getattr(owner, leaf), nn.Module):
        replace_module(model, path, nn.Identity())
    else:
        setattr(owner, leaf, None)


def drop_block(model: Any, path: str) -> None:
    """Delete a block and its entry in timm's `feature_info`. The other blocks keep their numbers."""
    parent, _, leaf = path.rpartition(".")
    delattr(model.get_submodule(parent), leaf)
    if hasattr(model, "feature_info"):
        model.feature_info = [entry for entry in model.feature_info if entry["module"] != path]


def linear_layer(model: nn.Module, path: str) -> nn.Linear:
    """The linear layer at `path`."""
    layer = model.get_submodule(path)
    assert isinstance(layer, nn.Linear), path
    return layer


def parameter_count(*modules: nn.Module) -> int:
    """Number of parameters of all these modules."""
    return sum(p.numel() for module in modules for p in module.parameters())
