"""The names of TensorRT that the exporters use are the library's, in every version that is supported."""

import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from library_names import USED, Names, names_of
from record_tensorrt_names import empty_libraries, record
from tensorrt_source_names import names_in

from vitcompress import exporters
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
    "ComputeCapability": {"SM80": None},
    "IBuilderConfig": {"num_compute_capabilities": [], "set_compute_capability": []},
}
# Versions of the bindings, and "" for the newest one. They are wheels without libraries.
VERSIONS = ("10.13.3.9", "10.16.1.11", "11.4.0.106", "")
SOURCES = names_in(sorted(Path(exporters.__path__[0], "tensorrt").glob("*.py")))


@pytest.fixture(scope="module")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Names]]:
    """Version and names of NVIDIA's own bindings, which are downloaded from the package registry."""
    libraries = tmp_path_factory.mktemp("libraries")
    empty_libraries(libraries)

    def load(version: str) -> tuple[str, Names]:
        folder = tmp_path_factory.mktemp("bindings")
        wanted = "tensorrt-cu13-bindings" + (f"=={version}" if version else "")
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), wanted]
        if (done := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
            pytest.skip(f"pip cannot download {wanted}: {done.stderr.strip().splitlines()[-1]}")
        (wheel,) = folder.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(folder)
        return record(folder, libraries, everything=True)

    return load


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
            if kind not in known or (name and name not in known[kind]):
                missing.append(f"{kind}.{name}")
            else:
                missing += [f"{kind}.{name}({word})" for word in words or () if word not in (known[kind][name] or ())]
    return missing


def names_for_tensorrt(names: Names) -> Names:
    """`names` without those that only TensorRT for RTX has."""
    only_rtx = {kind: {*own} - {"create_execution_context"} for kind, own in OF_RTX.items()}
    kinds = names.keys() - {kind for kind in OF_RTX if kind not in USED}
    return {kind: {n: w for n, w in names[kind].items() if n not in only_rtx.get(kind, ())} for kind in kinds}


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


def test_sources_use_the_names_of_the_record(simulated: Any) -> None:
    """The syntax trees name every class that the simulated library has, so no use is overlooked."""
    assert lacking(RECORDED["names"], names_for_tensorrt(SOURCES)) == []
    assert SOURCES.keys() >= set(names_of_simulated(simulated)) - {"DataType", "TensorIOMode"}  # used through `.name`
    assert SOURCES["IBuilderConfig"]["set_timing_cache"] == ["ignore_mismatch"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_has_the_names_of_sources_and_simulation(
    version: str, bindings: Callable[[str], tuple[str, Names]], simulated: Any
) -> None:
    """Both are compared with the class attributes, enum members and keywords of NVIDIA's own bindings."""
    installed, known = bindings(version)
    assert installed.startswith(version) and numbers(installed) >= (10, 13)
    assert lacking(known, names_for_tensorrt(SOURCES)) == lacking(known, names_of_simulated(simulated)) == []
    assert lacking(known, {"IBuilderConfig": {"set_flags": []}, "Builder": {"create_network": ["flag"]}}) != []
