"""Paths of modules and tensors in a model, as in `blocks.0.attn.proj.weight`: what lies in what."""

from collections.abc import Iterable


def enclosing(path: str, modules: Iterable[str]) -> str | None:
    """The first of `modules` that `path` is, or lies in; None where there is none."""
    return next((module for module in modules if f"{path}.".startswith(f"{module}.")), None)


def lies_in(path: str, modules: Iterable[str]) -> bool:
    """Whether `path` is one of `modules`, or lies in one of them."""
    return enclosing(path, modules) is not None
