"""Measure on a GPU: speed, the benchmark itself, training steps, scores, and a model of 1.1 billion parameters.

    python -m tests.campaigns.gpu speed kernels harness training scores giant --out FILE

Weights and images are random: no time depends on them. Without a GPU everything runs on the CPU.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import vitcompress as vc
from tests.campaigns.speed import Line, over_macs, prune_recipe, record, write
from tests.campaigns.speed import describe as describe_ratio
from vitcompress.bench import suite
from vitcompress.bench.artifacts import synthetic_images
from vitcompress.errors import first_line
from vitcompress.exporters.onnx.providers import CUDA
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runner import RunnerOptions
from vitcompress.exporters.tensorrt.flavours import capability
from vitcompress.families import family_of
from vitcompress.methods.upvit.importance import Importance, components
from vitcompress.models.cost import count_cost
from vitcompress.models.create import create_model, input_config
from vitcompress.training.datasets import as_images
from vitcompress.training.distributed import Runtime
from vitcompress.training.loaders import EvalLoader

DEPTH = ("deit_s_hetdpt", "deit_b_hetdpt", "nose_deit_s_4")
WIDTH = ("up_deit_s", "deit_iso_2_6g", "hetdpt_plus_2_4g", "deit_s_sero", "deit_b_sero")
# Format, precision, and settings. `+graph`: replayed as a CUDA graph. `+23`: exported with this opset.
FORMS = (
    "torch fp16",
    "torch fp16+graph",
    "torch bf16",
    "torch fp16+compile",
    "onnx fp16",
    "onnx fp16+23",
    "onnx fp16+graph",
    "trt fp16",
)
GIANT = "dinov2_g_hetdpt"
# Operations per second in fp16 and bf16 by datasheet, without sparsity. H100 and H200: SXM.
PEAKS = {"H100 80GB HBM3": 989e12, "H200": 989e12, "A100": 312e12}
SMALL_SIZE = 98  # of images of the large model
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Options:
    """batch, runs: of the paper protocol. model: of `harness`, `training` and UP-ViT. large: of transfer entropy.

    giant: recipe of the part `giant`. images, scored: for transfer entropy, and for UP-ViT.
    """

    recipes: Sequence[str] = (*DEPTH, *WIDTH)
    forms: Sequence[str] = FORMS
    batch: int = 256
    runs: int = 100
    model: str = "deit_small_patch16_224"
    large: str = "deit_base_patch16_224"
    giant: str = GIANT
    images: int = 10_240
    scored: int = 2_000

    def bench(self, **changes: Any) -> suite.BenchOptions:
        """The published protocol: 10 warm-up runs and `runs` timed ones of `batch` images."""
        return suite.BenchOptions("paper", self.batch, None, self.runs, RunnerOptions(device=DEVICE, **changes))


def attempt(what: str, work: Callable[..., Line], *arguments: object) -> Line:
    """`what` and the result of `work`, or the reason why there is none: what comes after it still runs."""
    try:
        return {"what": what, **work(*arguments)}
    except Exception as error:  # noqa: BLE001 - of any runtime
        return failed(what, error)


def guard(what: str, lines: Iterator[Line]) -> Iterator[Line]:
    """`lines`, and after an error between them the reason: what comes after them still runs."""
    try:
        yield from lines
    except Exception as error:  # noqa: BLE001 - as in `attempt`
        yield failed(what, error)


def failed(what: str, error: Exception) -> Line:
    return {"what": what, "text": f"not measured: {type(error).__name__}: {first_line(error)}"}


def describe(line: Line) -> str:
    """A line as text: its own `text`, or the ratio with its interval."""
    return f"{line['what']}: {line['text']}" if "text" in line else describe_ratio(line)


def peak() -> float | None:
    """Operations per second of this GPU in half precision by its datasheet; None if it is not in the table."""
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else ""
    return next((value for key, value in PEAKS.items() if key in name), None)


def share_of_peak(operations_per_second: float) -> float | None:
    return operations_per_second / limit if (limit := peak()) else None


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes until the GPU has finished it."""
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


def peak_bytes(work: Callable[[], object]) -> int | None:
    """Largest memory of tensors on the GPU during `work`; None without a GPU."""
    if DEVICE == "cpu":
        work()
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated()


# --- speed ---------------------------------------------------------------------------------------------------------


def speed(options: Options) -> Iterator[Line]:
    """Dense and pruned models, interleaved: speed-up over the ratio of the MACs, images/s, share of the peak."""
    for name in options.recipes:
        yield from guard(name, speed_of(name, options))


def speed_of(name: str, options: Options) -> Iterator[Line]:
    dense, pruned = prune_recipe(name)
    models = {"dense": dense, "pruned": vc.fold(pruned)}
    macs = {label: count_cost(model, input_config(model).size).macs for label, model in models.items()}
    with TemporaryDirectory() as folder:
        paths: dict[tuple[str, str], list[str | Path]] = {}
        for form in options.forms:
            yield attempt(f"{name}, {form}", measure_form, models, macs, form, paths, Path(folder), options)


def measure_form(
    models: dict[str, nn.Module],
    macs: dict[str, int],
    form: str,
    paths: dict[tuple[str, str], list[str | Path]],
    folder: Path,
    options: Options,
) -> Line:
    """One form of both models. paths: files that are already written, by format, precision and opset."""
    kind, _, settings = form.partition(" ")
    precision, *more = settings.split("+")
    # TF32 is a setting of ONNX Runtime, not of the file. A run folder serves every precision.
    stored = "" if kind == "torch" else "fp32" if (kind, precision) == ("onnx", "tf32") else precision
    opset = next((int(setting) for setting in more if setting.isdecimal()), None)
    began = time.perf_counter()
    key = (kind, f"{stored}-{opset}")
    if key not in paths:
        sm = capability() if kind == "trt-rtx" else None
        batch, targets = (1, options.batch, options.batch), (sm,) if sm else ()
        export = ExportOptions(stored or "fp32", batch=batch, sm=targets, opset=opset)  # type: ignore[arg-type]
        paths[key] = [
            write_artifact(m, folder / f"{label}-{'-'.join(key)}", kind, export) for label, m in models.items()
        ]
    written = time.perf_counter() - began
    variants, runner = settings if kind == "torch" else None, dict[str, Any]()
    if kind == "onnx":
        runner = {"precision": "tf32"} if precision == "tf32" else {}
        runner |= {"provider": CUDA} if DEVICE == "cuda" else {}
    if kind != "torch":
        runner |= {"cuda_graph": "graph" in more}
    bench = suite.run(paths[key], replace(options.bench(**runner), variants=variants))
    seconds = {"write": written, "all": time.perf_counter() - began}
    return {**compare_with_macs(bench, macs), "seconds": seconds}


def write_artifact(model: nn.Module, path: Path, kind: str, options: ExportOptions) -> Path:
    """Write the model to a folder, for torch, or to a file, whose suffix is added to `path`."""
    if kind != "torch":
        return write(model, path, kind, options)
    vc.save_model(model, path)
    return path


def compare_with_macs(bench: suite.Bench, macs: dict[str, int]) -> Line:
    """The only ratio of a benchmark over the ratio of the MACs, with all rows."""
    rows = [{**row, "artifact": label} for label, row in zip(macs, bench.rows, strict=True)]
    rates = {label: row["images_per_second"] for label, row in zip(macs, bench.rows, strict=True)}
    shares = {label: share_of_peak(2 * macs[label] * rate) for label, rate in rates.items()}
    return {
        **bench.ratios[0],
        **dict(zip("ab", macs, strict=True)),
        **over_macs(bench.ratios[0], macs["dense"] / macs["pruned"]),
        "macs": macs,
        "images_per_second": rates,
        "share_of_peak": shares,
        "rows": rows,
        "conditions": bench.machine["conditions"],
        "warnings": bench.warnings,
    }


# --- kernels -------------------------------------------------------------------------------------------------------


def kernels(options: Options) -> Iterator[Line]:
    """Time of each kernel in one fp16 pass of the dense and the pruned model in torch."""
    for name in options.recipes:
        yield from guard(f"{name}, kernels", kernels_of(name, options))


def kernels_of(name: str, options: Options) -> Iterator[Line]:
    dense, pruned = prune_recipe(name)
    for label, model in (("dense", dense), ("pruned", vc.fold(pruned))):
        yield attempt(f"{name}, kernels, {label}", time_kernels, model, options.batch)


@torch.inference_mode()
def time_kernels(model: nn.Module, batch: int, runs: int = 5) -> Line:
    """Milliseconds per pass and calls of each kernel, the largest first."""
    dtype = torch.float16 if DEVICE == "cuda" else torch.float32
    model = model.eval().to(DEVICE, dtype)
    images = synthetic_images(input_config(model).size, batch).to(DEVICE, dtype)
    for _ in range(3):
        model(images)
    synchronize()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if DEVICE == "cuda" else activity.CPU]) as profile:
        for _ in range(runs):
            model(images)
        synchronize()
    on_gpu, unit = DEVICE == "cuda", 1000 * runs
    times = {
        e.key: (e.self_device_time_total if on_gpu else e.self_cpu_time_total, e.count) for e in profile.key_averages()
    }
    rows = [(key[:120], time_us / unit, count / runs) for key, (time_us, count) in times.items() if time_us]
    rows.sort(key=lambda row: -row[1])
    total = sum(row[1] for row in rows)
    text = f"{total:.2f} ms per pass in {sum(row[2] for row in rows):.0f} kernels"
    return {"text": text, "total_ms": total, "kernels": rows[:25]}


# --- the benchmark itself ------------------------------------------------------------------------------------------


def harness(options: Options) -> Iterator[Line]:
    """The benchmark over a bare loop with CUDA events and one with the wall clock, and what it reports of the GPU."""
    model = create_model(options.model).eval()
    with TemporaryDirectory() as folder:
        vc.save_model(model, Path(folder, "run"))
        for variant in ("fp16", "fp16+graph") if DEVICE == "cuda" else ("fp32",):
            yield attempt(f"harness, torch {variant}", compare_loops, Path(folder, "run"), variant, options)
        yield attempt("another process on the GPU", with_another_process, Path(folder, "run"), options)


def bare_events(model: Callable[[Tensor], Tensor], images: Tensor, runs: int) -> float:
    """Median milliseconds of a run by CUDA events, as in any script; of the wall clock on the CPU."""
    if DEVICE == "cpu":
        return bare_wall(model, images, runs)
    event: Any = torch.cuda.Event
    pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(runs)]
    for start, end in pairs:
        start.record()
        model(images)
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in pairs)


def bare_wall(model: Callable[[Tensor], Tensor], images: Tensor, runs: int) -> float:
    """Milliseconds per run by the wall clock, with one synchronization at the end."""
    return 1000 * timed(lambda: [model(images) for _ in range(runs)]) / runs


@torch.inference_mode()
def compare_loops(folder: Path, variant: str, options: Options) -> Line:
    """Three turns of the benchmark, of events and of the wall clock; the ratios are those of the medians."""
    precision, *more = variant.split("+")
    dtype = {"fp16": torch.float16}.get(precision, torch.float32)
    model: Any = vc.load_model(folder).eval().to(DEVICE, dtype)
    images = synthetic_images(input_config(model).size, options.batch).to(DEVICE, dtype)
    call: Callable[[Tensor], Tensor] = model
    for _ in range(10):
        model(images)
    if "graph" in more:
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(images)
        call = lambda images: graph.replay()  # noqa: E731
    own, wall, events, bare = list[float](), list[float](), list[float](), list[float]()
    for _ in range(3):
        (row,) = suite.run([folder], replace(options.bench(), variants=variant)).rows
        own.append(row["latency_ms"]["p50"])
        wall.append(1000 * options.batch / row["images_per_second"])
        for _ in range(3):
            call(images)
        events.append(bare_events(call, images, options.runs))
        bare.append(bare_wall(call, images, options.runs))
    by_events, by_wall = median(own) / median(events), median(wall) / median(bare)
    return {
        "text": f"{by_events:.3f} of CUDA events, {by_wall:.3f} of the wall clock",
        "over_events": by_events,
        "over_wall": by_wall,
        "samples_ms": {"bench": own, "bench_wall": wall, "events": events, "wall": bare},
        "row": {k: v for k, v in row.items() if k != "samples_ms"},
    }


BUSY = "import torch; x = torch.randn(8192, 8192, device='{}')\nwhile True: x @ x"


def with_another_process(folder: Path, options: Options) -> Line:
    """The conditions that the benchmark records alone and beside a process that keeps the GPU busy."""
    alone = suite.run([folder], options.bench())
    with subprocess.Popen([sys.executable, "-c", BUSY.format(DEVICE)]) as other:
        try:
            time.sleep(8)
            beside = suite.run([folder], options.bench())
        finally:  # leaving the block waits for its end
            other.kill()
    result = {"alone": alone, "beside": beside}
    return {
        "text": "; ".join(f"{name}: {', '.join(bench.disturbed) or 'undisturbed'}" for name, bench in result.items()),
        "process": other.pid,
        "conditions": {name: bench.machine["conditions"] for name, bench in result.items()},
        "warnings": {name: bench.warnings for name, bench in result.items()},
        "joules": {name: [(row["joules"], row["images_per_joule"]) for row in b.rows] for name, b in result.items()},
        "energy_of": [row["energy_of"] for row in alone.rows],
    }


# --- training ------------------------------------------------------------------------------------------------------


def training(options: Options) -> Iterator[Line]:
    """One training step of a dense model by precision, with torch.compile and activation checkpointing."""
    for amp, setting in (("none", ""), ("fp16", ""), ("bf16", ""), ("bf16", "checkpointing"), ("bf16", "compiled")):
        what = f"training step, {amp}{f', {setting}' if setting else ''}"
        yield attempt(what, train_steps, create_model(options.model), amp, setting, options.batch)


def train_steps(model: Any, amp: Any, setting: str, batch: int, steps: int = 10) -> Line:
    """Images per second in `vc.finetune` on batches that are on the GPU, without the first epoch, and its memory."""
    if not model.num_classes:
        model.reset_classifier(1000)
    model.to(DEVICE)
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(setting == "checkpointing")
    if setting == "compiled":
        model.compile()
    size = input_config(model).size
    images = torch.randn(batch, *size, device=DEVICE)
    batches = [(images, torch.randint(model.num_classes, (batch,), device=DEVICE))] * steps
    seconds: list[float] = []

    def train() -> None:
        result = vc.finetune(model, batches, device=DEVICE, amp=amp, epochs=3, lr=1e-5, evaluate_every=0)
        seconds.extend(record["seconds"] for record in result.history[1:])

    memory = peak_bytes(train)
    rate = batch * steps / min(seconds)
    macs = count_cost(model.cpu(), size).macs
    share = share_of_peak(3 * 2 * macs * rate)  # backward: twice the products of forward
    text = f"{rate:.0f} images/s" + (f", {100 * share:.1f} % of the peak" if share else "")
    text += f", {memory / 2**30:.1f} GiB" if memory else ""
    about = {"images_per_second": rate, "share_of_peak": share, "peak_bytes": memory, "batch": batch}
    return {"text": text, **about, "seconds": seconds, "macs": macs, "steps": steps}


# --- a large model -------------------------------------------------------------------------------------------------


def giant(options: Options) -> Iterator[Line]:
    """A model of 1.1 billion parameters: prune, fold, measure; a training step with and without checkpointing."""
    began = time.perf_counter()
    dense, pruned = prune_recipe(options.giant)
    models = {"dense": dense, "pruned": vc.fold(pruned)}
    parameters = {label: sum(p.numel() for p in model.parameters()) for label, model in models.items()}
    seconds = time.perf_counter() - began
    text = f"{parameters['dense'] / 1e6:.1f} M parameters, {parameters['pruned'] / 1e6:.1f} M after, in {seconds:.0f} s"
    yield {"what": "giant, prune and fold", "text": text, "seconds": seconds, "parameters": parameters}
    small = replace(options, batch=min(64, options.batch), runs=min(30, options.runs))
    yield attempt("giant, torch fp16", measure_models, models, small)
    del models, pruned
    for size in (224, SMALL_SIZE):
        if hasattr(dense, "set_input_size"):
            dense.set_input_size(img_size=size)
        for setting in ("", "checkpointing"):
            what = f"giant, training step, {size} px{f', {setting}' if setting else ''}"
            yield attempt(what, train_steps, dense, "bf16", setting, min(32, options.batch), 3)


# --- scores --------------------------------------------------------------------------------------------------------


def measure_models(models: dict[str, nn.Module], options: Options) -> Line:
    """Two models in memory, in fp16 in torch."""
    macs = {label: count_cost(model, input_config(model).size).macs for label, model in models.items()}
    settings = {"protocol": "paper", "batch": options.batch, "runs": options.runs, "device": DEVICE}
    bench = vc.bench(list(models.values()), precision="fp16", **settings)
    memory = {name: row["memory"] for name, row in zip(models, bench.rows, strict=True)}
    return {**compare_with_macs(bench, macs), "memory": memory}


def random_batches(size: tuple[int, int, int], count: int, batch: int) -> list[tuple[Tensor, Tensor]]:
    """`count` random images in the memory of the host."""
    sizes = [min(batch, count - done) for done in range(0, count, batch)]
    return [(torch.randn(n, *size, device=DEVICE).cpu(), torch.arange(n) % 1000) for n in sizes]


@torch.inference_mode()
def one_pass(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    for images, _ in batches:
        model(images.to(DEVICE)).argmax(dim=1).cpu()


def scores(options: Options) -> Iterator[Line]:
    """Transfer entropy and UP-ViT's scores, over one forward pass per candidate; products of fp32 are in TF32."""
    torch.backends.cuda.matmul.allow_tf32 = True
    yield attempt("transfer entropy", transfer_entropy, options)
    yield attempt("UP-ViT", upvit, options)


def transfer_entropy(options: Options) -> Line:
    """Every layer of the large model on all images, over as many passes as there are layers and one more."""
    model = create_model(options.large).eval().to(DEVICE)
    batches = random_batches(input_config(model).size, options.images, options.batch)
    one_pass(model, batches[:2])
    seconds = timed(partial(one_pass, model, batches))
    sites = [site for site in family_of(model).sites(model) if site.kind in ("attention", "activation")]
    te = {"images": options.images}
    own = timed(lambda: vc.plan(model, "te_static", batches, device=DEVICE, pruned_layers=1, te=te))
    passes = len(sites) + 1
    text = f"{own:.1f} s for {len(sites)} layers and {options.images} images"
    text += f", {own / seconds / passes:.2f} of {passes} passes"
    about = {"seconds": own, "one_pass_seconds": seconds, "passes": passes, "images": options.images}
    return {"text": text, **about, "over_passes": own / seconds / passes}


def upvit(options: Options) -> Line:
    """Estimated scores of all channels, exact scores of a sample of them, and one forward pass, on the same images."""
    model = create_model(options.model).eval().to(DEVICE)
    family = family_of(model)
    parts = components(family.spaces(model))
    channels = sum(part.size for part in parts)
    batches = random_batches(input_config(model).size, options.scored, min(options.batch, 50))
    one_pass(model, batches[:2])
    seconds = timed(partial(one_pass, model, batches))
    target = {"embed_dim": model.embed_dim // 2, "num_heads": model.blocks[0].attn.num_heads // 2}  # type: ignore
    settings = {"target_args": target, "images": options.scored, "score": "fisher"}
    fisher = timed(lambda: vc.plan(model, "upvit", batches, device=DEVICE, **settings))
    runtime = Runtime(torch.device(DEVICE))
    source = as_images([(i, int(t)) for images, labels in batches for i, t in zip(images, labels, strict=True)], ())
    loader = EvalLoader(source, input_config(model), 50, runtime)
    importance, sample = Importance(model, family, images_at_once=1000), {"mlp": 16, "attention": 16, "residual": 8}
    exact: dict[str, float] = {}
    for kind, count in sample.items():
        part = next((p for p in parts if p.kind == kind), None)
        if part is not None:
            only = range(min(count, part.size))
            exact[part.name] = timed(partial(importance.scores, part, loader, only)) / len(only)
    text = (
        f"{fisher:.1f} s for {channels} channels, {seconds * channels / fisher:.0f} times cheaper than a pass for each"
    )
    about = {"seconds": fisher, "one_pass_seconds": seconds, "channels": channels, "images": options.scored}
    return {"text": text, **about, "exact_seconds_per_channel": exact, "sample": sample}


PARTS: dict[str, Callable[[Options], Iterator[Line]]] = {
    "speed": speed,
    "kernels": kernels,
    "harness": harness,
    "training": training,
    "scores": scores,
    "giant": giant,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, and write the file after every line."""
    default = Options()
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    for name, value in vars(default).items():
        many = isinstance(value, tuple)
        parser.add_argument(f"--{name}", type=str if many else type(value), nargs="+" if many else None, default=value)
    args = vars(parser.parse_args(arguments))
    options = Options(**{name: args[name] for name in vars(default)})
    lines = (line for part in args["parts"] for line in guard(part, PARTS[part](options)))
    record(lines, args["out"], vars(options), lambda line: f"{describe(line)}{rates(line)}")
    return 0


def rates(line: Line) -> str:
    """The images per second and shares of the peak of a line, as text."""
    if "macs_ratio" not in line:
        return ""
    shares = {name: f" ({100 * share:.0f} %)" if share else "" for name, share in line["share_of_peak"].items()}
    text = ", ".join(f"{name} {rate:.0f}/s{shares[name]}" for name, rate in line["images_per_second"].items())
    return f"; {text}"


if __name__ == "__main__":
    sys.exit(main())
