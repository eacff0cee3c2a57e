"""Throughput that the suite reports over that of a bare loop on the same ONNX Runtime session."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from vitcompress.bench import timing
from vitcompress.bench.artifacts import synthetic_images
from vitcompress.bench.self.parts import Options, line
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.onnx.session import Session
from vitcompress.exporters.runner import RunnerOptions
from vitcompress.models.create import create_model, input_config

AIM = (0.99, 1.01)
ARCH, BATCH = "deit_tiny_patch16_224", 1  # the smallest model and batch: where a harness would cost most
ROUNDS_PER_RUN = 5


def run(options: Options) -> Iterator[dict[str, Any]]:
    """Many short blocks: what disturbs a machine comes in bursts, and medians forget the few blocks they spoil."""
    path = options.folder / "harness.onnx"
    model = create_model(ARCH)
    export(model, path, input=input_config(model))
    session = Session(path, RunnerOptions(threads=options.threads))
    images = synthetic_images(session.input_size, BATCH, 0).numpy()
    bare = partial(session.session.run, None, {"images": images})
    protocol = timing.Protocol("block", BATCH, warmup=1, runs=5)
    ours, plain = timing.Samples("harness", BATCH, "wall"), timing.Samples("bare loop", BATCH, "wall")
    target = timing.Target("harness", session.bind(images))
    for _ in range(ROUNDS_PER_RUN * options.runs):
        (part,) = timing.measure([target], protocol)
        ours.blocks_ms.append([1000 * BATCH / part.images_per_second])
        bare()
        began = time.perf_counter()
        for _ in range(protocol.runs):
            bare()
        plain.blocks_ms.append([1000 * (time.perf_counter() - began) / protocol.runs])
    yield line("harness", plain, ours, AIM)
