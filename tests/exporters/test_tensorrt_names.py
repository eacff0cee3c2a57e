"""The names of TensorRT that the exporters use are the library's, in every version that is supported."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from library_names import USED, Names, names_of

from vitcompress.exporters.tensorrt.flavours import TRT, numbers
from vitcompress.exporters.tensorrt.worker import TYPES

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "data" / "tensorrt_names.json").read_text())
# Names that tests with the simulated library do not reach: errors of the parser, and bf16.
UNREACHED: Names = {
    "DataType": dict.fromkeys(TYPES),
    "OnnxParser": {"get_error": ["index"]},
    "ParserError": {"desc": [], "node_name": [], "node_operator": []},
}
# Names that only TensorRT for RTX has, and only a GPU reaches.
OF_RTX: Names = {
    "ICudaEngine": {"create_runtime_config": [], "create_execution_context": ["runtime_config"]},
    "IRuntimeConfig": dict.fromkeys(("cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy")),
    "DynamicShapesKernelSpecializationStrategy": {"EAGER": None},
    "CudaGraphStrategy": {"WHOLE_GRAPH_CAPTURE": None, "DISABLED": None},
}


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that replaces TensorRT on the simulated GPU; importing it replaces nothing."""
    folder = HERE.parent / "helpers" / "simulated"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("simulated_tensorrt", folder / "tensorrt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lacking(known: Names, used: Names) -> list[str]:
    """Names in `used` that a library with the names in `known` does not have."""
    missing = []
    for kind, attributes in used.items():
        for name, words in attributes.items():
            if name not in known.get(kind, {}):
                missing.append(f"{kind}.{name}")
            else:
                missing += [f"{kind}.{name}({word})" for word in words or () if word not in (known[kind][name] or ())]
    return missing


def names_of_simulated(library: Any) -> Names:
    """Names of the simulated library, with the constructors of those classes only that callers create."""
    names = names_of(library)
    created_by_callers = ("Builder", "OnnxParser", "Runtime")
    return {
        kind: {name: words for name, words in attributes.items() if name != "__init__" or kind in created_by_callers}
        for kind, attributes in names.items()
    }


def test_tensorrt_has_every_name(simulated: Any) -> None:
    """The record has the names that all versions have in common."""
    used = names_of_simulated(simulated)
    assert used.keys() | UNREACHED.keys() == USED
    assert lacking(RECORDED["names"], used) == lacking(RECORDED["names"], UNREACHED) == []
    oldest, newest = RECORDED["versions"][0], RECORDED["versions"][-1]
    assert numbers(oldest)[:2] == TRT.oldest and numbers(newest)[0] == 11


def test_tensorrt_for_rtx_has_every_name(simulated: Any) -> None:
    library = pytest.importorskip("tensorrt_rtx", reason="no such library for this platform")
    known = names_of(library)
    assert lacking(known, UNREACHED) == lacking(known, OF_RTX) == []
    assert lacking(known, names_of_simulated(simulated)) == []


def test_missing_names_are_reported() -> None:
    known = RECORDED["names"]
    assert lacking(known, {"Runtime": {"deserialize_engine": []}, "IBuilderConfig": {"set_flag": ["flags"]}}) == [
        "Runtime.deserialize_engine",
        "IBuilderConfig.set_flag(flags)",
    ]
    assert lacking(known, {"Runtimes": {"__init__": []}}) == ["Runtimes.__init__"]
