"""Measure what int8 and fp8 cost: time and memory of quantizing, sizes of files, and whether two builds are equal.

    python -m tests.campaigns.eight_bits --out bench/results/eight-bits-epyc.json

Quantizing is measuring the ranges of DeiT-B on 256 images and writing the file, over one pass of its fp32 file over the
same images, four at a time, in turn; the peak memory is that of a process that exports the model in int8. Weights are
random, images noise. Every engine is built twice, in two processes. Exit code 1 if two builds differ.
"""

import argparse
import hashlib
import multiprocessing
import platform
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import vitcompress as vc
from tests.campaigns.speed import QUANTIZED, prune_recipe
from vitcompress.bench.artifacts import synthetic_images
from vitcompress.exporters.onnx.rounded import open_changed
from vitcompress.exporters.options import EightBits, ExportOptions
from vitcompress.exporters.quantize.calibrate import CHUNK, calibrate
from vitcompress.exporters.quantize.graph import Quantization, quantize
from vitcompress.exporters.runtimes import EXPORTERS
from vitcompress.io.files import write_json
from vitcompress.io.hardware import cpu_name, package_versions
from vitcompress.models.create import create_model, input_config

LARGE, IMAGES, ROUNDS = "deit_base_patch16_224", 256, 3
ENGINES: tuple[tuple[EightBits, tuple[int, ...]], ...] = (("int8", (80, 86, 89, 120)), ("fp8", (89, 120)))


def write(model: nn.Module, path: Path, form: str, images: Tensor, **options: Any) -> Path:
    """Export a model, in eight bits with ranges of `images`."""
    settings, exporter = ExportOptions(**options), EXPORTERS[form]
    ranges = partial(calibrate, images=images, precision=settings.eight_bits or "int8")
    return exporter.export(model, path, options=settings, input=input_config(model), calibrate=ranges).path


def measure_time(arch: str) -> dict[str, list[float]]:
    """Seconds of passes in fp32 and of quantizing, in turn."""
    model, seconds = create_model(arch), dict[str, list[float]](fp32_pass=[], quantize=[])
    images = synthetic_images(input_config(model).size, IMAGES)
    with TemporaryDirectory() as folder:
        plain = write(model, Path(folder, "fp32.onnx"), "onnx", images)
        for _ in range(ROUNDS):
            began = time.perf_counter()
            call = open_changed(plain, plain.read_bytes(), optimize=True)
            for chunk in images.split(CHUNK):
                call(chunk)
            seconds["fp32_pass"].append(time.perf_counter() - began)
            began = time.perf_counter()
            settings = Quantization("int8", calibrate(plain, images, "int8"), weight_bits=7)
            quantize(plain, Path(folder, "int8.onnx"), settings)
            seconds["quantize"].append(time.perf_counter() - began)
    return seconds


def measure_memory(arch: str) -> float:
    """Peak memory, in GiB, of this process, which exports the model in int8."""
    model = create_model(arch)
    with TemporaryDirectory() as folder:
        images = synthetic_images(input_config(model).size, IMAGES)
        write(model, Path(folder, "int8.onnx"), "onnx", images, precision="int8")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure_sizes(recipe: str) -> dict[str, dict[str, int]]:
    """Bytes of the files of the dense and of the pruned model."""
    dense, pruned = prune_recipe(recipe)
    sizes = {}
    for name, model in {"dense": dense, recipe: vc.fold(pruned)}.items():
        images = synthetic_images(input_config(model).size, CHUNK)
        with TemporaryDirectory() as folder:
            files = {p: write(model, Path(folder, f"{p}.onnx"), "onnx", images, precision=p) for p in ("fp32", "int8")}
            sizes[name] = {precision: path.stat().st_size for precision, path in files.items()}
    return sizes


def build_engine(recipe: str, precision: EightBits, target: int) -> str:
    """SHA-256 of an engine of the pruned model. No two calls know of each other."""
    torch.manual_seed(0)
    model = vc.fold(prune_recipe(recipe)[1])
    options: dict[str, Any] = {"precision": precision, "sm": (target,), "batch": (1, 8, 8)}
    with TemporaryDirectory() as folder:
        images = synthetic_images(input_config(model).size, CHUNK)
        path = write(model, Path(folder, "model.engine"), "trt-rtx", images, **options)
        return hashlib.sha256(path.read_bytes()).hexdigest()


def campaign(out: Path, arch: str = LARGE, recipes: Sequence[str] = QUANTIZED) -> bool:
    """Write all results to `out`, each as soon as it is known. Whether every engine was built twice alike."""
    about = {"command": "python -m tests.campaigns.eight_bits", "cpu": cpu_name(), "arch": arch}
    versions = package_versions(("torch", "timm", "onnx", "onnxruntime", "onnxruntime-gpu", "tensorrt-rtx"))
    results: dict[str, Any] = {**about, "python": platform.python_version(), "versions": versions, "engines": []}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:  # a new process for each call
        results["seconds"] = pool.submit(measure_time, arch).result()
        results["peak_gib"] = pool.submit(measure_memory, arch).result()
        results["bytes"] = {recipe: pool.submit(measure_sizes, recipe).result() for recipe in recipes}
        write_json(out, results)
        for precision, targets in ENGINES if not EXPORTERS["trt-rtx"].unavailable() else ():
            for target in targets:
                builds = [pool.submit(build_engine, recipes[0], precision, target).result() for _ in range(2)]
                results["engines"].append({"precision": precision, "sm": target, "sha256": builds})
                write_json(out, results)
    return all(len(set(one["sha256"])) == 1 for one in results["engines"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    return 0 if campaign(parser.parse_args(arguments).out) else 1


if __name__ == "__main__":
    sys.exit(main())
