"""The benchmark compared with a bare loop."""

import time
from collections.abc import Iterator
from functools import partial

from vitcompress.bench import timing
from vitcompress.bench.artifacts import synthetic_images
from vitcompress.bench.self.parts import Line, Options, time_ratio
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.onnx.runner import OnnxRunner
from vitcompress.exporters.runner import RunnerOptions
from vitcompress.models.create import create_model, input_config

AIM = (0.99, 1.01)
ARCH, BATCH = "deit_tiny_patch16_224", 1  # the smallest model and batch, where a harness costs most
ROUNDS_PER_RUN = 5


def run(options: Options) -> Iterator[Line]:
    """Throughput as reported by the benchmark over that of a bare loop on the same ONNX Runtime session."""
    path = options.folder / "harness.onnx"
    model = create_model(ARCH)
    export(model, path, input=input_config(model))
    runner = OnnxRunner(path, RunnerOptions(threads=options.threads))
    images = synthetic_images(runner.input_size, BATCH, 0)
    bare = partial(runner.session.run, None, {"images": images.numpy()})
    protocol = timing.Protocol("block", BATCH, warmup=1, runs=5)
    ours, plain = timing.Samples("harness", BATCH, "wall"), timing.Samples("bare loop", BATCH, "wall")
    target = timing.Target("harness", runner.bind(images))
    for _ in range(ROUNDS_PER_RUN * options.runs):  # many short blocks: disturbances come in bursts and spoil few
        (part,) = timing.measure([target], protocol)
        ours.blocks_ms.append([1000 * BATCH / part.images_per_second])
        bare()
        began = time.perf_counter()
        for _ in range(protocol.runs):
            bare()
        plain.blocks_ms.append([1000 * (time.perf_counter() - began) / protocol.runs])
    yield time_ratio("harness", plain, ours, AIM)
