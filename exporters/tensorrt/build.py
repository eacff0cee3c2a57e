"""Build engines from ONNX files with TensorRT (10.12 to 11) or TensorRT for RTX.

They are strongly typed: the ONNX file determines the precision. TF32 products are off unless requested.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from vitcompress.errors import ArtifactError, InputError, VitcompressError
from vitcompress.exporters.onnx.export import INPUT
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.tensorrt.flavours import RTX, Flavour, create_log
from vitcompress.io.files import write_bytes
from vitcompress.io.progress import Progress

NETWORK = "vitcompress"  # a network without a name gets one that changes with each build, and so do the engine's bytes
POLL_SECONDS = 0.1  # how often the main thread checks whether the build is done or was interrupted
COMPATIBLE = {"ampere+": "AMPERE_PLUS", "same": "SAME_COMPUTE_CAPABILITY"}


class Built(NamedTuple):
    """An engine, the duration of its build, and the library's warnings."""

    data: bytes
    seconds: float
    warnings: list[str]


def build(flavour: Flavour, onnx: Path, size: Sequence[int], options: ExportOptions, progress: Progress) -> Built:
    """Build an engine from `onnx`, whose input images have the shape `size`.

    options: their `sm` are the targets of TensorRT for RTX; TensorRT builds for the GPU of this machine. Raises
    MissingExtraError without the library, VitcompressError if it does not support the graph (the message names the
    node) or cannot build it, and KeyboardInterrupt after Ctrl-C, which cancels the build.
    """
    library = flavour.load()
    monitor = _create_monitor(library, f"build the {flavour.title} engine", progress)

    def work() -> Built:
        log, start = create_log(library), time.perf_counter()
        builder = flavour.create("Builder", log)
        network = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        network.name = NETWORK
        parser = library.OnnxParser(network, log)  # holds the weights: must exist until the engine is built
        if not parser.parse_from_file(str(onnx)):
            raise _parser_error(flavour, parser, log)
        config = _create_config(library, flavour, builder, options)
        cache = _use_timing_cache(config, options.timing_cache)
        profile = builder.create_optimization_profile()
        profile.set_shape(INPUT, *((images, *size) for images in options.batch))
        config.add_optimization_profile(profile)
        config.progress_monitor = monitor
        engine = builder.build_serialized_network(network, config)
        if engine is None:
            message = f"{flavour.title} {library.__version__} could not build the engine: {log.first_and_last_error()}"
            hint = "try another opset, precision or target; the message is the library's own"
            raise VitcompressError(message, hint=hint)
        if options.timing_cache is not None:
            write_bytes(options.timing_cache, bytes(memoryview(cache.serialize())))
        return Built(bytes(memoryview(engine)), time.perf_counter() - start, log.warnings)

    return _run_in_thread(work, monitor)


def _create_config(library: Any, flavour: Flavour, builder: Any, options: ExportOptions) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = library.ProfilingVerbosity.DETAILED  # for the inspector
    if options.precision != "tf32":
        config.clear_flag(library.BuilderFlag.TF32)
    if options.workspace is not None:
        config.set_memory_pool_limit(library.MemoryPoolType.WORKSPACE, options.workspace)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.hardware_compatible != "none":
        levels = library.HardwareCompatibilityLevel
        config.hardware_compatibility_level = getattr(levels, COMPATIBLE[options.hardware_compatible])
    if options.version_compatible:
        config.set_flag(library.BuilderFlag.VERSION_COMPATIBLE)
    if flavour is RTX:
        config.num_compute_capabilities = len(options.sm)
        for number, target in enumerate(options.sm):
            config.set_compute_capability(getattr(library.ComputeCapability, f"SM{target}"), number)
    return config


def _use_timing_cache(config: Any, path: Path | None) -> Any:
    """Let the build use and extend the kernel times of earlier builds, if `path` exists; a new cache otherwise."""
    if path is None:
        return None
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise InputError(f"the timing cache {path} cannot be read: {error.strerror}") from None
    cache = config.create_timing_cache(data)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        message = f"{path} is not a timing cache of this version on this GPU"
        raise ArtifactError(message, hint="name another file, or remove this one")
    return cache


def _run_in_thread(work: Callable[[], Built], monitor: Any) -> Built:
    """The result of `work`, run in a thread of its own, so that Ctrl-C interrupts the main thread immediately.

    All callbacks of the library run in that thread: it ignores a KeyboardInterrupt raised in its log callback. After an
    error, the frames of its traceback no longer reference the builder: freeing that later waits for a lock that the
    library holds while it logs that it creates the next one, a deadlock.
    """

    def clear(future: Future[Built]) -> None:
        if error := future.exception():
            traceback.clear_frames(error.__traceback__)

    with ThreadPoolExecutor(1, "build") as pool:
        try:
            future = pool.submit(work)
            future.add_done_callback(clear)
            while not future.done():
                time.sleep(POLL_SECONDS)
        except BaseException:
            monitor.stopped = True  # the builder checks this before each step; leaving the block waits for its end
            raise
    return future.result()


def _parser_error(flavour: Flavour, parser: Any, log: Any) -> VitcompressError:
    """Why the parser rejects a graph, and at which node."""
    if not parser.num_errors:
        return VitcompressError(f"{flavour.title} cannot read the ONNX file: {log.first_and_last_error()}")
    error = parser.get_error(0)
    operator = error.node_operator() or "graph"
    place = f"the node {error.node_name()} ({operator})" if error.node_name() else "the ONNX file"
    lines = [line.strip() for line in error.desc().splitlines() if line.strip()]
    reason = next((line for line in lines if not line.startswith("Invalid Node")), "no reason reported")
    hint = "--opset 20 decomposes attention and supports any width" if operator == "Attention" else None
    return VitcompressError(f"{flavour.title} does not support {place}: {reason}", hint=hint)


def _create_monitor(library: Any, title: str, progress: Progress) -> Any:
    """Shows the phases of a build as progress. The builder stops after a step if `stopped` is set."""

    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            library.IProgressMonitor.__init__(self)
            self.stopped = False
            self._outermost, self._done, self._steps = "", 0, 1  # name of the outermost phase, and its steps

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if not self._outermost:
                self._outermost, self._steps = phase, steps
            self._show(phase)

        def step_complete(self, phase: str, step: int) -> bool:
            if phase == self._outermost:
                self._done = min(step + 1, self._steps - 1)
            return not self.stopped

        def phase_finish(self, phase: str) -> None:
            if phase == self._outermost and not self.stopped:
                self._done = self._steps
                self._show("")

        def _show(self, text: str) -> None:
            progress.update(title, self._done, self._steps, text.lower())

    return Monitor()
