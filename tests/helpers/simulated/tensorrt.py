"""A simulated TensorRT: its engines are ONNX files, which ONNX Runtime runs at the addresses of the bound tensors.

It tests our calls of the library, not the library itself. All classes, attributes and parameters have the names of the
library, and there are no others: code that works here uses no name that the library lacks
(`tests/exporters/test_tensorrt_names.py`).
"""

import ctypes
import enum
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import simulated_queue

VERSION = (10, 14, 1, 48)
__version__ = ".".join(map(str, VERSION))
MAGIC, HEADER, LENGTH = b"ftrt", 64, 8
TYPES = {"tensor(float)": ("FLOAT", np.float32), "tensor(float16)": ("HALF", np.float16)}
TYPES |= {"tensor(uint8)": ("UINT8", np.uint8)}
TIMINGS = b"timings"
Shape = tuple[int, ...]


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class IProgressMonitor:
    """Receives the progress of a build."""


class NetworkDefinitionCreationFlag(enum.IntEnum):
    STRONGLY_TYPED = 1


ProfilingVerbosity = enum.Enum("ProfilingVerbosity", "LAYER_NAMES_ONLY NONE DETAILED")
BuilderFlag = enum.Enum("BuilderFlag", "TF32 VERSION_COMPATIBLE")
MemoryPoolType = enum.Enum("MemoryPoolType", "WORKSPACE")
HardwareCompatibilityLevel = enum.Enum("HardwareCompatibilityLevel", "NONE AMPERE_PLUS SAME_COMPUTE_CAPABILITY")
LayerInformationFormat = enum.Enum("LayerInformationFormat", "ONELINE JSON")
TensorIOMode = enum.Enum("TensorIOMode", "NONE INPUT OUTPUT")
DataType = enum.Enum("DataType", "FLOAT HALF UINT8")


class INetworkDefinition:
    __slots__ = ("_graph", "name")


class OnnxParser:
    __slots__ = ("_network", "num_errors")

    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self._network, self.num_errors = network, 0

    def parse_from_file(self, model: str) -> bool:
        self._network._graph = onnx.load(model).SerializeToString()
        return True


class ITimingCache:
    __slots__ = ()

    def serialize(self) -> bytes:
        return TIMINGS


class IOptimizationProfile:
    __slots__ = ("_shapes",)

    def set_shape(self, input: str, min: Shape, opt: Shape, max: Shape) -> None:
        self._shapes = {input: (min, opt, max)}


class IBuilderConfig:
    __slots__ = (
        "_profiles",
        "builder_optimization_level",
        "hardware_compatibility_level",
        "profiling_verbosity",
        "progress_monitor",
    )

    def __init__(self) -> None:
        self._profiles = list[IOptimizationProfile]()

    def clear_flag(self, flag: BuilderFlag) -> None: ...

    def set_flag(self, flag: BuilderFlag) -> None: ...

    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: int) -> None: ...

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache | None:
        return ITimingCache() if serialized_timing_cache in (b"", TIMINGS) else None

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        return True


class Builder:
    __slots__ = ()

    def __init__(self, logger: ILogger) -> None: ...

    def create_network(self, flags: int) -> INetworkDefinition:
        assert flags == 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED
        return INetworkDefinition()

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> bytes | None:
        config.progress_monitor.phase_start("Building", None, 2)
        if not all(config.progress_monitor.step_complete("Building", step) for step in range(2)):
            return None
        config.progress_monitor.phase_finish("Building")
        head = bytearray(HEADER)
        head[: len(MAGIC)], head[24:28] = MAGIC, bytes(VERSION)
        about = json.dumps(config._profiles[0]._shapes).encode()
        return bytes(head) + len(about).to_bytes(LENGTH, "little") + about + network._graph


class Runtime:
    __slots__ = ("_logger", "engine_host_code_allowed", "tempfile_control_flags")

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> "ICudaEngine | None":
        data, start = serialized_engine, HEADER + LENGTH
        end = start + int.from_bytes(data[HEADER:start], "little")
        try:
            return ICudaEngine(json.loads(data[start:end]), data[end:], self._logger)
        except Exception as error:  # noqa: BLE001 - a damaged file can raise anything
            self._logger.log(ILogger.ERROR, f"not an engine: {error}")
            return None


class ICudaEngine:
    """An ONNX file with the shapes of a profile, {input: (minimum, optimal, maximum)}."""

    __slots__ = ("_contexts", "_ends", "_inputs", "_logger", "_outputs", "_session", "_shapes", "num_io_tensors")

    def __init__(self, shapes: dict[str, Any], graph: bytes, logger: Any) -> None:
        self._shapes, self._logger, self._contexts = shapes, logger, 0
        self._session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
        self._inputs = {tensor.name: tensor for tensor in self._session.get_inputs()}
        self._outputs = {tensor.name: tensor for tensor in self._session.get_outputs()}
        self._ends = {**self._inputs, **self._outputs}
        self.num_io_tensors = len(self._ends)

    def get_tensor_name(self, index: int) -> str:
        return list(self._ends)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self._inputs else TensorIOMode.OUTPUT

    def get_tensor_shape(self, name: str) -> Shape:
        return tuple(size if isinstance(size, int) else -1 for size in self._ends[name].shape)

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[TYPES[self._ends[name].type][0]]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Shape]:
        return [tuple(shape) for shape in self._shapes[name]]

    def create_execution_context(self) -> "IExecutionContext":
        self._contexts += 1
        return IExecutionContext(self, 0 if self._contexts == 1 else -1)

    def create_engine_inspector(self) -> "EngineInspector":
        return EngineInspector()


class EngineInspector:
    __slots__ = ()

    def get_engine_information(self, format: LayerInformationFormat) -> str:
        return LAYERS


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


class IExecutionContext:
    """Shapes and addresses of one engine, and its runs."""

    __slots__ = ("_addresses", "_engine", "_images", "_settled", "active_optimization_profile", "nvtx_verbosity")

    def __init__(self, engine: ICudaEngine, profile: int) -> None:
        self._engine, self.active_optimization_profile = engine, profile
        self._images: Shape = ()
        self._settled = False  # whether it has run with this shape, without which it cannot be recorded
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.active_optimization_profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        least, _, largest = self._engine._shapes[name]
        inside = all(low <= size <= high for low, size, high in zip(least, shape, largest, strict=True))
        if not inside or self.active_optimization_profile < 0:
            self._engine._logger.log(ILogger.ERROR, f"{shape} is not in the profile")
            return False
        self._images, self._settled = shape, self._settled and shape == self._images
        return True

    def get_tensor_shape(self, name: str) -> Shape:
        return tuple(self._images[0] if size < 0 else size for size in self._engine.get_tensor_shape(name))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        if simulated_queue.Graph.recording is not None and not self._settled:
            self._engine._logger.log(ILogger.ERROR, "operation not permitted when stream is capturing")
            return False
        self._settled = True
        simulated_queue.queue(self._run_with({name: self._at(name) for name in self._engine._ends}))
        return True

    def _run_with(self, memory: dict[str, np.ndarray]) -> Callable[[], None]:
        def run() -> None:
            feed = {name: memory[name] for name in self._engine._inputs}
            values = self._engine._session.run(list(self._engine._outputs), feed)
            for name, value in zip(self._engine._outputs, values, strict=True):
                memory[name][...] = value

        return run

    def _at(self, name: str) -> np.ndarray:
        """The memory bound to a tensor."""
        shape, kind = self.get_tensor_shape(name), np.dtype(TYPES[self._engine._ends[name].type][1])
        size = int(np.prod(shape)) * kind.itemsize
        return np.frombuffer((ctypes.c_char * size).from_address(self._addresses[name]), kind).reshape(shape)
