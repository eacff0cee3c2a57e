"""Record the names of TensorRT from its bindings alone: `python tests/helpers/record_tensorrt_names.py FOLDER...`

Each FOLDER holds an unpacked wheel `tensorrt_cu12_bindings` or `tensorrt_cu13_bindings` of one version. The bindings
need libraries that are not on PyPI; empty ones are enough to read the names. Needs a C compiler `cc`.
"""

import json
import os
import subprocess
import sys
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory

from library_names import Names

RECORD = Path(__file__).parents[1] / "exporters" / "data" / "tensorrt_names.json"
LIBRARIES = ("nvinfer", "nvinfer_plugin", "nvonnxparser")
FUNCTIONS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getInferLibVersion",
    "getLogger",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)
SCRIPT = """
import json, sys
from library_names import USED, names_of
import tensorrt_bindings as library
names = {kind: named for kind, named in names_of(library).items() if kind in USED or sys.argv[1:]}
json.dump([library.__version__, names], sys.stdout)
"""


def empty_libraries(folder: Path) -> None:
    """Build libraries with the functions that the bindings load, without content."""
    source = folder / "empty.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in FUNCTIONS))
    for library in LIBRARIES:
        for major in (10, 11):
            subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / f"lib{library}.so.{major}", source], check=True)


def record(bindings: Path, libraries: Path, *, everything: bool = False) -> tuple[str, Names]:
    """Version and names of the bindings in a folder. everything: all classes, not only those in USED."""
    here = str(Path(__file__).parent)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": f"{bindings}{os.pathsep}{here}"}
    command = [sys.executable, "-c", SCRIPT, *["everything"] * everything]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    version, names = json.loads(done.stdout)
    return version, names


def shared(one: Names, other: Names) -> Names:
    """The names that both versions have."""
    return {
        kind: {
            name: parameters and [word for word in parameters if word in (other[kind][name] or ())]
            for name, parameters in attributes.items()
            if name in other[kind]
        }
        for kind, attributes in one.items()
        if kind in other
    }


def main(folders: list[str]) -> None:
    """Write the names that all versions have in common."""
    with TemporaryDirectory() as libraries:
        empty_libraries(Path(libraries))
        records = [record(Path(folder).resolve(), Path(libraries)) for folder in folders]
    common = reduce(shared, (names for _, names in records))
    versions = sorted(
        (version for version, _ in records), key=lambda v: [int(n) for n in v.split(".") if n.isdecimal()]
    )
    RECORD.write_text(json.dumps({"versions": versions, "names": common}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
