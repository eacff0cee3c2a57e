"""Stands in for TensorRT where none can run: engines are ONNX files, run by ONNX Runtime at the addresses given.

It shows our side of the conversation with the library, and nothing of the library itself.
"""

import ctypes
import enum
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pretended_gpu

VERSION = (10, 14, 1, 48)
__version__ = ".".join(map(str, VERSION))
MAGIC, HEADER, LENGTH = b"ftrt", 64, 8
TYPES = {"tensor(float)": ("FLOAT", np.float32), "tensor(float16)": ("HALF", np.float16)}
TYPES |= {"tensor(uint8)": ("UINT8", np.uint8)}


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class IProgressMonitor:
    """What a build tells of itself."""


class NetworkDefinitionCreationFlag(enum.IntEnum):
    STRONGLY_TYPED = 1


ProfilingVerbosity = enum.Enum("ProfilingVerbosity", "LAYER_NAMES_ONLY NONE DETAILED")
BuilderFlag = enum.Enum("BuilderFlag", "TF32 VERSION_COMPATIBLE")
MemoryPoolType = enum.Enum("MemoryPoolType", "WORKSPACE")
HardwareCompatibilityLevel = enum.Enum("HardwareCompatibilityLevel", "NONE AMPERE_PLUS SAME_COMPUTE_CAPABILITY")
LayerInformationFormat = enum.Enum("LayerInformationFormat", "ONELINE JSON")
TensorIOMode = enum.Enum("TensorIOMode", "NONE INPUT OUTPUT")
DataType = enum.Enum("DataType", "FLOAT HALF UINT8")


class OnnxParser:
    num_errors = 0

    def __init__(self, network: Any, log: Any) -> None:
        self.network = network

    def parse_from_file(self, path: str) -> bool:
        self.network.graph = onnx.load(path).SerializeToString()
        return True


class Config:
    def __init__(self) -> None:
        self.flags, self.limits, self.profiles = {BuilderFlag.TF32}, dict[Any, int](), list[Any]()
        self.clear_flag, self.set_flag = self.flags.discard, self.flags.add
        self.set_memory_pool_limit = self.limits.__setitem__
        self.add_optimization_profile = self.profiles.append

    def create_timing_cache(self, data: bytes) -> Any:
        whole = not data or data == b"timings"
        return SimpleNamespace(serialize=lambda: b"timings") if whole else None

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        return True


class Profile:
    def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        self.shapes = {name: shapes}


class Builder:
    def __init__(self, log: Any) -> None:
        self.create_builder_config, self.create_optimization_profile = Config, Profile

    def create_network(self, flags: int) -> Any:
        assert flags == 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED
        return SimpleNamespace()

    def build_serialized_network(self, network: Any, config: Any) -> bytes | None:
        config.progress_monitor.phase_start("Building", None, 2)
        if not all(config.progress_monitor.step_complete("Building", step) for step in range(2)):
            return None
        config.progress_monitor.phase_finish("Building")
        head = bytearray(HEADER)
        head[: len(MAGIC)], head[24:28] = MAGIC, bytes(VERSION)
        about = json.dumps(config.profiles[0].shapes).encode()
        return bytes(head) + len(about).to_bytes(LENGTH, "little") + about + bytes(network.graph)


class Runtime:
    def __init__(self, log: Any) -> None:
        self.log = log

    def deserialize_cuda_engine(self, data: bytes) -> "Engine | None":
        start = HEADER + LENGTH
        end = start + int.from_bytes(data[HEADER:start], "little")
        try:
            return Engine(json.loads(data[start:end]), data[end:], self.log)
        except Exception as error:  # noqa: BLE001 - whatever a damaged file leads to
            self.log.log(ILogger.ERROR, f"not an engine: {error}")
            return None


class Engine:
    """An ONNX file with the shapes of a profile, {input: (least, best, largest)}."""

    def __init__(self, shapes: dict[str, Any], graph: bytes, log: Any) -> None:
        self.shapes, self.log, self.contexts = shapes, log, 0
        self.session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
        self.inputs = {tensor.name: tensor for tensor in self.session.get_inputs()}
        self.outputs = {tensor.name: tensor for tensor in self.session.get_outputs()}
        self.ends = {**self.inputs, **self.outputs}
        self.num_io_tensors = len(self.ends)

    def get_tensor_name(self, number: int) -> str:
        return list(self.ends)[number]

    def get_tensor_mode(self, name: str) -> Any:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else -1 for size in self.ends[name].shape)

    def get_tensor_dtype(self, name: str) -> Any:
        return DataType[TYPES[self.ends[name].type][0]]

    def get_tensor_profile_shape(self, name: str, number: int) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self.shapes[name]]

    def create_execution_context(self) -> "Context":
        self.contexts += 1
        return Context(self, 0 if self.contexts == 1 else -1)

    def create_engine_inspector(self) -> Any:
        return SimpleNamespace(get_engine_information=lambda form: LAYERS)


HALVES = [{"Name": "a", "Dimensions": [2, 4], "Format/Datatype": "Row major linear FP16 format"}]
LAYERS = json.dumps(
    {
        "Layers": [
            {"Name": f"_gemm_mha_v2_{n}", "LayerType": "kgen", "Inputs": HALVES, "Outputs": HALVES, "TacticName": ""}
            for n in range(12)
        ],
        "Bindings": [],
    }
)


class Context:
    """What is set and run of an engine."""

    def __init__(self, engine: Engine, profile: int) -> None:
        self.engine, self.active_optimization_profile = engine, profile
        self.images: tuple[int, ...] = ()
        self.addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, number: int, stream: int) -> bool:
        self.active_optimization_profile = number
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, largest = self.engine.shapes[name]
        inside = all(low <= size <= high for low, size, high in zip(least, shape, largest, strict=True))
        if not inside or self.active_optimization_profile < 0:
            self.engine.log.log(ILogger.ERROR, f"{shape} is not in the profile")
            return False
        self.images = shape
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.images[0] if size < 0 else size for size in self.engine.get_tensor_shape(name))

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        pretended_gpu.queue(self._run_with({name: self._at(name) for name in self.engine.ends}))
        return True

    def _run_with(self, memory: dict[str, np.ndarray]) -> Callable[[], None]:
        def run() -> None:
            given = {name: memory[name] for name in self.engine.inputs}
            found = self.engine.session.run(list(self.engine.outputs), given)
            for name, value in zip(self.engine.outputs, found, strict=True):
                memory[name][...] = value

        return run

    def _at(self, name: str) -> np.ndarray:
        """The memory that was given for a tensor."""
        shape, kind = self.get_tensor_shape(name), np.dtype(TYPES[self.engine.ends[name].type][1])
        size = int(np.prod(shape)) * kind.itemsize
        return np.frombuffer((ctypes.c_char * size).from_address(self.addresses[name]), kind).reshape(shape)
