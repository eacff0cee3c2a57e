"""The names of a TensorRT library: classes, their attributes, and the parameters of their methods."""

import inspect
import re
from types import ModuleType
from typing import Any

Names = dict[str, dict[str, list[str] | None]]  # class -> attribute -> parameters, None if not a method
# Classes of TensorRT that the exporters use.
USED = frozenset(
    {
        "Builder",
        "BuilderFlag",
        "DataType",
        "EngineInspector",
        "HardwareCompatibilityLevel",
        "IBuilderConfig",
        "ICudaEngine",
        "IExecutionContext",
        "ILogger",
        "INetworkDefinition",
        "IOptimizationProfile",
        "IProgressMonitor",
        "ITimingCache",
        "LayerInformationFormat",
        "MemoryPoolType",
        "NetworkDefinitionCreationFlag",
        "OnnxParser",
        "ParserError",
        "ProfilingVerbosity",
        "Runtime",
        "TensorIOMode",
    }
)
SIGNATURE = re.compile(r"^(?:\d+\. )?\w+\((.*)\)(?: -> .*)?$", re.M)  # a line in the docstring of a compiled method


def names_of(library: ModuleType) -> Names:
    """The names of a library's own classes; the attributes of an enum are its members."""
    classes = {name: kind for name, kind in vars(library).items() if inspect.isclass(kind)}
    own = {
        name: kind for name, kind in classes.items() if kind.__module__.split(".")[0] not in ("typing", "collections")
    }
    return {name: attributes(kind) for name, kind in sorted(own.items()) if not name.startswith("_")}


def attributes(kind: Any) -> dict[str, list[str] | None]:
    names = getattr(kind, "__members__", None)
    if names is not None:
        return dict.fromkeys(names)
    return {
        name: parameters(getattr(kind, name)) for name in dir(kind) if not name.startswith("_") or name == "__init__"
    }


def parameters(value: Any) -> list[str] | None:
    """Names of a method's parameters in all its overloads, without the object itself."""
    if inspect.isfunction(value):
        return list(inspect.signature(value).parameters)[1:]
    lines = SIGNATURE.findall(getattr(value, "__doc__", None) or "") if callable(value) else []
    named = [part.split(":")[0].split("=")[0].strip() for line in lines for part in parts(line)]
    return list(dict.fromkeys(name for name in named if name.isidentifier() and name != "self")) if lines else None


def parts(text: str) -> list[str]:
    """The parts between commas outside all brackets."""
    result, depth = [""], 0
    for letter in text:
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and not depth:
            result.append("")
        else:
            result[-1] += letter
    return result
