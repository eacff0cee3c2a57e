"""From an ONNX file to the bytes of an engine: strongly typed, so that precision is what the ONNX file says.

Works with TensorRT (10.12 to 11) and TensorRT for RTX alike. TF32 products are off unless asked for: the libraries
switch them on by themselves.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vitcompress.errors import ArtifactError, InputError, VitcompressError
from vitcompress.exporters.onnx.export import INPUT
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.tensorrt.flavours import RTX, Flavour, log_of
from vitcompress.io.files import write_bytes
from vitcompress.io.progress import Progress

NETWORK = "vitcompress"  # a network without a name gets one that changes from build to build, and with it the bytes
LOOK = 0.1  # seconds between two looks at whether the build is done or was interrupted
COMPATIBLE = {"ampere+": "AMPERE_PLUS", "same": "SAME_COMPUTE_CAPABILITY"}


@dataclass(frozen=True)
class Built:
    """An engine, how long its build took, and what the library warned of."""

    data: bytes
    seconds: float
    warnings: tuple[str, ...]


def build(
    flavour: Flavour,
    onnx: Path,
    size: Sequence[int],
    options: ExportOptions,
    targets: Sequence[int],
    progress: Progress | None = None,
) -> Built:
    """Build an engine from `onnx`.

    Args:
        size: shape of one image as the file takes it, without the batch.
        targets: compute capabilities, for TensorRT for RTX; TensorRT builds for the GPU that is there.

    Raises:
        MissingExtraError: the library is not installed.
        VitcompressError: it refuses the graph (the message names the node) or cannot build it.
        KeyboardInterrupt: Ctrl-C; the build has been cancelled.
    """
    library = flavour.load()
    monitor = _monitor(library, flavour, progress or Progress())
    return _watched(partial(_built, library, flavour, onnx, size, options, targets, monitor), monitor)


def _built(
    library: Any,
    flavour: Flavour,
    onnx: Path,
    size: Sequence[int],
    options: ExportOptions,
    targets: Sequence[int],
    monitor: Any,
) -> Built:
    log, began = log_of(library), time.perf_counter()
    builder = flavour.made("Builder", log)
    network = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    network.name = NETWORK
    parser = library.OnnxParser(network, log)  # holds the weights: kept until the engine is built
    if not parser.parse_from_file(str(onnx)):
        raise _refused(flavour, parser, log)
    config = _config(library, flavour, builder, options, targets)
    cache = _use_timing_cache(config, options.timing_cache)
    _add_profile(builder, config, size, options.batch)
    config.progress_monitor = monitor
    made = builder.build_serialized_network(network, config)
    if made is None:
        raise VitcompressError(
            f"{flavour.title} {library.__version__} could not build the engine: {log.first_and_last_error()}",
            hint="try another opset, precision or target; the message is the library's own",
        )
    if options.timing_cache is not None:
        write_bytes(options.timing_cache, bytes(memoryview(cache.serialize())))
    return Built(bytes(memoryview(made)), time.perf_counter() - began, tuple(log.warnings))


def _config(library: Any, flavour: Flavour, builder: Any, options: ExportOptions, targets: Sequence[int]) -> Any:
    """The builder's configuration."""
    config = builder.create_builder_config()
    config.profiling_verbosity = library.ProfilingVerbosity.DETAILED  # what the inspector is asked about later
    if options.precision != "tf32":
        config.clear_flag(library.BuilderFlag.TF32)
    if options.workspace is not None:
        config.set_memory_pool_limit(library.MemoryPoolType.WORKSPACE, options.workspace)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.hardware_compatible != "none":
        level = COMPATIBLE[options.hardware_compatible]
        config.hardware_compatibility_level = getattr(library.HardwareCompatibilityLevel, level)
    if options.version_compatible:
        config.set_flag(library.BuilderFlag.VERSION_COMPATIBLE)
    if flavour is RTX:
        config.num_compute_capabilities = len(targets)
        for number, target in enumerate(targets):
            config.set_compute_capability(getattr(library.ComputeCapability, f"SM{target}"), number)
    return config


def _use_timing_cache(config: Any, path: Path | None) -> Any:
    """What earlier builds have measured, for this build to use and add to; an empty cache where there is none yet."""
    if path is None:
        return None
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise InputError(f"the timing cache {path} cannot be read: {error.strerror}") from None
    cache = config.create_timing_cache(data)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise ArtifactError(
            f"{path} is not a timing cache of this version on this GPU", hint="name another file, or remove this one"
        )
    return cache


def _add_profile(builder: Any, config: Any, size: Sequence[int], batch: Sequence[int]) -> None:
    profile = builder.create_optimization_profile()
    profile.set_shape(INPUT, *((images, *size) for images in batch))
    config.add_optimization_profile(profile)


def _watched(work: Callable[[], Built], monitor: Any) -> Built:
    """The result of `work`, done in a thread of its own, so that Ctrl-C is heard here meanwhile.

    All callbacks of the library run in that thread: it swallows a KeyboardInterrupt raised in its log callback.
    """
    with ThreadPoolExecutor(1, "build") as pool:
        try:
            done: Future[Built] = pool.submit(_let_go, work)
            while not done.done():
                time.sleep(LOOK)
        except BaseException:
            monitor.stopped = True  # the builder asks before each of its steps; leaving the block waits for its end
            raise
    return done.result()


def _let_go(work: Callable[[], Built]) -> Built:
    """The result of `work`; when it fails, nothing that it held stays alive in the frames of the error.

    The garbage collector would free a builder at any time, such as while the library logs that it makes the next one
    and holds a lock that freeing the first one waits for: a deadlock.
    """
    try:
        return work()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise


def _refused(flavour: Flavour, parser: Any, log: Any) -> VitcompressError:
    """Why the parser refuses a graph, and at which node."""
    if not parser.num_errors:
        return VitcompressError(f"{flavour.title} cannot read the ONNX file: {log.first_and_last_error()}")
    error = parser.get_error(0)
    operator = error.node_operator() or "graph"
    place = f"the node {error.node_name()} ({operator})" if error.node_name() else "the ONNX file"
    lines = [line.strip() for line in error.desc().splitlines() if line.strip()]
    said = next((line for line in lines if not line.startswith("Invalid Node")), "it gives no reason")
    return VitcompressError(
        f"{flavour.title} cannot take {place}: {said}",
        hint="--opset 20 decomposes attention, which takes any width" if operator == "Attention" else None,
    )


def _monitor(library: Any, flavour: Flavour, progress: Progress) -> Any:
    """The build's phases in our progress display, and the place where the builder asks whether to go on."""

    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            library.IProgressMonitor.__init__(self)
            self.stopped = False
            self._whole: str | None = None  # name of the outermost phase
            self._done, self._steps = 0, 1

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if self._whole is None:
                self._whole, self._steps = phase, steps
            self._show(phase)

        def step_complete(self, phase: str, step: int) -> bool:
            if phase == self._whole:
                self._done = min(step + 1, self._steps - 1)
            return not self.stopped

        def phase_finish(self, phase: str) -> None:
            if phase == self._whole and not self.stopped:
                self._done = self._steps
                self._show("")

        def _show(self, text: str) -> None:
            progress.update(f"build the {flavour.title} engine", self._done, self._steps, text.lower())

    return Monitor()
