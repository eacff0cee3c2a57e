"""The names of TensorRT that source code uses, read from its syntax trees."""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from library_names import Names

MODULE = "the library"
# Objects that methods of the library return.
RETURNED = {
    "create_network": "INetworkDefinition",
    "create_builder_config": "IBuilderConfig",
    "create_optimization_profile": "IOptimizationProfile",
    "create_timing_cache": "ITimingCache",
    "create_engine_inspector": "EngineInspector",
    "create_execution_context": "IExecutionContext",
    "create_runtime_config": "IRuntimeConfig",
    "deserialize_cuda_engine": "ICudaEngine",
    "get_error": "ParserError",
}
# Variables whose type no assignment shows: parameters of functions.
PARAMETERS = {
    "builder": "Builder",
    "config": "IBuilderConfig",
    "context": "IExecutionContext",
    "library": MODULE,
    "parser": "OnnxParser",
}


class _Reader:
    """Follows the library's objects through the assignments and the functions of one module."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.returned: dict[str, str | None] = {}  # function of the module -> type
        self.names: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))

    def read(self) -> Names:
        for _ in range(3):  # types of functions become known after their bodies, attributes after their functions
            self.attributes = {f"self.{key}": kind for key, kind in self._assigned(self.tree, {}).items()}
            for function in ast.walk(self.tree):
                if isinstance(function, ast.FunctionDef):
                    known = self._assigned(function, dict(PARAMETERS))
                    results = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
                    self.returned[function.name] = next(filter(None, (self.kind(r, known) for r in results)), None)
        for function in ast.walk(self.tree):
            if isinstance(function, ast.FunctionDef | ast.ClassDef):
                self._record(function, self._assigned(function, dict(PARAMETERS)))
        return {kind: {name: sorted(words) for name, words in own.items()} for kind, own in self.names.items()}

    def _assigned(self, function: ast.AST, known: dict[str, str]) -> dict[str, str]:
        """Types of the variables (`name`) and attributes (of `self`, without it) that are assigned in `function`."""
        for node in ast.walk(function):
            if not isinstance(node, ast.Assign):
                continue
            targets = node.targets[0]
            pairs = [(target, node.value) for target in node.targets]
            if isinstance(targets, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(targets.elts, node.value.elts, strict=True))
            for target, value in pairs:
                key = target.id if isinstance(target, ast.Name) else getattr(target, "attr", None)
                if key and (kind := self.kind(value, known)):
                    known[key] = kind
        return known

    def kind(self, node: ast.expr, known: dict[str, str]) -> str | None:
        """The class of the library that an expression is an object of (or names, as in `library.BuilderFlag`)."""
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                return getattr(self, "attributes", {}).get(f"self.{node.attr}")
            return node.attr if self.kind(node.value, known) == MODULE and node.attr[0].isupper() else None
        if isinstance(node, ast.BoolOp):
            return next(filter(None, (self.kind(value, known) for value in node.values)), None)
        if isinstance(node, ast.IfExp):
            return self.kind(node.body, known) or self.kind(node.orelse, known)
        if not isinstance(node, ast.Call):
            return None
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "create" and node.args and isinstance(node.args[0], ast.Constant):  # Flavour.create("Builder", ...)
            return str(node.args[0].value)
        if name == "load":
            return MODULE
        return RETURNED.get(name) or self.returned.get(name) or self.kind(node.func, known)

    def _record(self, function: ast.AST, known: dict[str, str]) -> None:
        for node in ast.walk(function):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:  # methods with these names are called by the library
                    if (kind := self.kind(base, known)) is not None:
                        own = (part.name for part in node.body if isinstance(part, ast.FunctionDef))
                        callbacks = ("log", "phase_start", "phase_finish", "step_complete")
                        self.names[kind] |= {name: set() for name in own if name in callbacks}
            if not isinstance(node, ast.Attribute) or (isinstance(node.value, ast.Name) and node.value.id == "self"):
                continue
            kind = self.kind(node.value, known)
            if kind == MODULE and node.attr[0].isupper():
                self.names[node.attr].setdefault("", set())
            elif kind not in (None, MODULE):
                self.names[kind].setdefault(node.attr, set())  # type: ignore[index]
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                kind = self.kind(node.func.value, known)
                if kind not in (None, MODULE):
                    words = {word.arg for word in node.keywords if word.arg}
                    self.names[kind].setdefault(node.func.attr, set()).update(words)  # type: ignore[index]


def names_in(files: Iterable[Path]) -> Names:
    """Class of TensorRT -> attribute -> keywords; the attribute "" only states that the class is used."""
    merged: Names = {}
    for file in files:
        for kind, own in _Reader(ast.parse(file.read_text(encoding="utf-8"))).read().items():
            for name, words in own.items():
                there = merged.setdefault(kind, {}).setdefault(name, [])
                merged[kind][name] = sorted({*(there or ()), *(words or ())})
    return merged
