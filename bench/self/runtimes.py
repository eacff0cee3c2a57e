"""Dense and pruned models in all runtimes, and the benchmark compared with a bare loop."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from vitcompress import surgery
from vitcompress.bench import artifacts, suite, timing
from vitcompress.bench.self import parts
from vitcompress.bench.self.parts import Aim, Line, Options, compare, prune_recipe
from vitcompress.errors import VitcompressError, first_line
from vitcompress.exporters import available_exporter
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.onnx.libraries import RTX
from vitcompress.exporters.onnx.providers import CUDA, TENSORRT
from vitcompress.exporters.onnx.runner import OnnxRunner
from vitcompress.exporters.options import ExportOptions, Precision
from vitcompress.exporters.runtimes import RunnerOptions, open_runner
from vitcompress.exporters.tensorrt.flavours import capability
from vitcompress.families import family_of
from vitcompress.methods.depth import depth_plan, plan_layers
from vitcompress.models.cost import count_cost
from vitcompress.models.create import create_model, input_config, plan_of
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe

SMALLEST = "deit_tiny_patch16_224"  # with batch 1, where a harness costs most
ROUNDS_PER_RUN = 5
DENSE = (SMALLEST, "deit_small_patch16_224")
DEPTH_AIM, WIDTH_AIM = 0.97, 0.9  # published widths reached 0.74 (SERo), 0.63 (isomorphic pruning) and 0.77 (HetDPT+)
# NOSE's recipes choose their layers themselves; these are the attentions that its authors' search removed from DeiT-S.
NOSE, GREEDY = "nose_deit_s_4", (0, 2, 4, 6)
# Widths of one head's q/k and v, and of an FFN, 30 % in all: SERo's table 3 prunes q/k most and v least.
SERO = {"unaligned": (7, 49, 724), "uniform": (8, 48, 720), "tied": (32, 32, 576), "padded": (8, 48, 720)}
RELEASED = {"deit_iso_2_6g": 0, "hetdpt_plus_2_4g": 3}  # recipe -> its step that prunes widths
GPU_RECIPES = ("deit_s_hetdpt", "deit_b_hetdpt", "deit_s_sero", "deit_b_sero", "up_deit_s", *RELEASED)
GPU_FILES: dict[str, tuple[Precision, ...]] = {
    "onnx": ("fp32", "fp16"),
    "trt": ("fp32", "tf32", "fp16", "bf16"),
    "trt-rtx": ("fp32", "fp16", "bf16"),
}  # on GPUs; on the CPU only the first precision
PROVIDERS = (CUDA, TENSORRT, RTX)  # of ONNX Runtime


def time_harness(options: Options) -> Iterator[Line]:
    """Throughput as reported by the benchmark over that of a bare loop on the same ONNX Runtime session."""
    path = options.folder / "harness.onnx"
    model = create_model(SMALLEST)
    export(model, path, input=input_config(model))
    runner = OnnxRunner(path, RunnerOptions(threads=options.threads))
    images = artifacts.synthetic_images(runner.input_size, 1, 0)
    bare = partial(runner.session.run, None, {"images": images.numpy()})
    protocol = timing.Protocol("block", batch=1, warmup=1, runs=5)
    ours, plain = timing.Samples("harness", 1, "wall"), timing.Samples("bare loop", 1, "wall")
    target = timing.Target("harness", runner.bind(images))
    for _ in range(ROUNDS_PER_RUN * options.runs):  # many short blocks: disturbances come in bursts and spoil few
        (part,) = timing.measure([target], protocol)
        ours.blocks_ms.append([1000 / part.images_per_second])
        bare()
        began = time.perf_counter()
        for _ in range(protocol.runs):
            bare()
        plain.blocks_ms.append([1000 * (time.perf_counter() - began) / protocol.runs])
    yield parts.time_ratio("harness", plain, ours, aim=(0.99, 1.01))


def run_dense(options: Options) -> Iterator[Line]:
    """Dense DeiT-T and DeiT-S: our ONNX file and OpenVINO over timm's own ONNX export of the same model."""
    for arch in DENSE if options.arch == Options.arch else (options.arch,):
        model = create_model(arch)
        config = input_config(model)
        files = {name: options.folder / f"{name}.onnx" for name in ("timm's own ONNX", "our ONNX")}
        artifacts.export_by_timm(model, files["timm's own ONNX"])
        export(model, files["our ONNX"], input=config)
        precisions = {f"OpenVINO {precision}": precision for precision in ("fp32", "bf16")}
        for name, precision in precisions.items():
            path = options.folder / "ours.xml"
            try:
                available_exporter("openvino", hint="").export(model, path, input=config)
                open_runner(path, RunnerOptions(threads=options.threads, precision=precision)).close()
                files[name] = path
            except VitcompressError as error:
                yield {"what": f"{arch}, {name}", "text": f"not measured: {error.message}"}
        bench = compare(files, options.protocol(), precisions)
        for ratio, line in zip(bench.ratios, parts.speed_ratios(bench, options), strict=True):
            aim: Aim = (1.0, None) if ratio["b"] == "our ONNX" else (None, None)
            yield {"what": f"{arch}, {ratio['b']} over {ratio['a']}", **line, "aim": aim}


def run_depth(options: Options) -> Iterator[Line]:
    """Speed-up of HetDPT and NOSE models on ONNX Runtime (CPU) over the ratio of their MACs."""
    for name in ("deit_s_hetdpt", "deit_b_hetdpt"):
        dense, model = prune_recipe(name)
        yield from realised(dense, {name: model}, options, DEPTH_AIM)
    dense, model = without_attentions(NOSE, GREEDY)
    yield from realised(dense, {NOSE: model}, options, DEPTH_AIM)


def run_widths(options: Options) -> Iterator[Line]:
    """Speed-up of width-pruned models on ONNX Runtime (CPU) over the ratio of their MACs, by layout of the widths."""
    arch = "deit_base_patch16_224"
    layouts = {f"deit_b_sero {name}": keep_widths(arch, *of, padded=name == "padded") for name, of in SERO.items()}
    yield from realised(create_model(arch), layouts, options, WIDTH_AIM)
    dense, model = prune_recipe("up_deit_s")  # a standard DeiT-S has no unaligned widths
    yield from realised(dense, {"up_deit_s": model}, options, WIDTH_AIM)
    for name, step in RELEASED.items():
        changes = [f"step.{step}.{change}" for change in ("target=ratios", "amount=", "round_to=2")]
        dense, released = prune_recipe(name, changes)
        models = {f"{name} as released": released, f"{name} aligned": prune_recipe(name)[1]}
        yield from realised(dense, models, options, WIDTH_AIM)


def without_attentions(name: str, blocks: Sequence[int]) -> tuple[nn.Module, nn.Module]:
    """Dense model of a recipe, and a copy without the attentions of these blocks, bypassed as in its first step."""
    recipe = load_recipe(name)
    dense = create_model(recipe.model.name, recipe.model.args)
    plan = plan_layers(dense, plan_of(dense), {"attention": blocks}, recipe.steps[0].options)
    return dense, surgery.apply_to_copy(dense, plan)


def keep_widths(arch: str, qk: int, v: int, ffn: int, *, padded: bool = False) -> nn.Module:
    """The model with this number of q/k and v channels per head and of FFN channels in every block.

    padded: attention computes with zeros up to the wider of q/k and v.
    """
    model, sizes = create_model(arch), {"qk": qk, "v": v, "mlp": ffn}
    spaces = [space for space in family_of(model).spaces(model) if space.kind in sizes]
    kept = {space.name: parts.first_channels(space, sizes[space.kind]) for space in spaces}
    attentions = dict.fromkeys(s.attention for s in spaces if s.attention and padded)
    return surgery.apply_plan(model, Plan(arch, kept=kept, padded=tuple(attentions)))


def realised(dense: nn.Module, smaller: Mapping[str, nn.Module], options: Options, aim: float) -> Iterator[Line]:
    """Speed-up of each model over its ratio of multiply-accumulates, all exported alike and interleaved."""
    macs, paths = dict[str, int](), dict[str, Path]()
    for name, model in {"dense": dense, **smaller}.items():
        macs[name] = count_cost(model, input_config(dense).size).macs
        paths[name] = options.folder / f"{name.replace(' ', '-')}.onnx"
        export(model, paths[name], input=input_config(dense))
    bench = compare(paths, options.protocol())
    for name, line in zip(smaller, parts.speed_ratios(bench, options), strict=True):
        macs_ratio = macs["dense"] / macs[name]
        speedup, ends = line["ratio"], line["ci95"]
        share = {"ratio": speedup / macs_ratio, "ci95": [None if end is None else end / macs_ratio for end in ends]}
        figures = {"aim": [aim, None], "macs_ratio": macs_ratio, "speedup": speedup, "speedup_ci95": ends}
        yield {"what": f"realised {name}", **line, **share, **figures}
    for path in paths.values():
        path.unlink()


def run_gpu(options: Options) -> Iterator[Line]:
    """The paper protocol on a GPU (without one on the CPU): dense and pruned in torch, ONNX Runtime and TensorRT."""
    batch, runs = options.explicit
    settings = suite.BenchOptions("paper", batch, None, runs)
    for name, dense, pruned in _pairs(options):
        for what, runner, form, precision in _settings(options):
            line = {"what": f"{name}, {what}", "device": runner.device}
            try:
                both = {"dense": dense, "pruned": pruned}
                measured = _export_both(both, form, precision, options) if form else both
                bench = compare(measured, replace(settings, runner=runner)).to_dict()
            except Exception as error:  # noqa: BLE001 - a failure in one runtime is reported, and the others continue
                kind = "" if isinstance(error, VitcompressError) else f"{type(error).__name__}: "
                yield line | {"text": f"not measured: {kind}{first_line(error)}"}
                continue
            ratio = bench["ratio"]
            figures = {
                "ratio": ratio["median"],
                "ci95": ratio["ci95"],
                "aim": [None, None],
                "verdict": ratio["verdict"],
            }
            yield line | figures | {"bench": {key: bench[key] for key in ("rows", "machine", "warnings")}}


def _pairs(options: Options) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Dense and pruned models with random weights; of an explicit architecture only one, without an attention."""
    if options.arch != Options.arch:
        dense, model = create_model(options.arch), create_model(options.arch)
        surgery.apply_plan(model, depth_plan(model, Plan(options.arch), (0,), (0,), attention_bypass="norm_identity"))
        yield f"{options.arch} without its first attention", dense, model
        return
    for name in GPU_RECIPES:
        yield name, *prune_recipe(name)


def _settings(options: Options) -> Iterator[tuple[str, RunnerOptions, str, Precision]]:
    """Every runtime and setting as text, how models run in it, and the format and precision of files, if any."""
    device, batch = "cuda" if torch.cuda.is_available() else "cpu", options.explicit[0]
    runner = RunnerOptions(device=device, threads=options.threads, batch=(batch, batch, batch) if batch else None)
    for variant, changes in artifacts.parse_variants(",".join(artifacts.ALL[device]), device).items():
        yield f"torch {variant}", replace(runner, **changes), "", "fp32"
    for form, precisions in GPU_FILES.items():
        for precision in precisions if device == "cuda" else precisions[:1]:
            for provider in PROVIDERS if form == "onnx" and device == "cuda" else (None,):
                what = f"{form} {precision}{f' in {provider}' if provider else ''}"
                yield what, replace(runner, provider=provider), form, precision


def _export_both(models: Mapping[str, nn.Module], form: str, precision: Precision, options: Options) -> dict[str, Path]:
    exporter, batch = available_exporter(form, hint=""), options.explicit[0]
    if reason := exporter.cannot_run():
        raise VitcompressError(reason)
    settings = ExportOptions(precision=precision)
    if batch:  # engines are tuned for the batch size that is measured
        settings = replace(settings, batch=(1, batch, batch))
    if form == "trt-rtx" and (sm := capability()):
        settings = replace(settings, sm=(sm,))
    paths = {name: options.folder / f"{name}{exporter.suffix}" for name in models}
    for name, model in models.items():
        exporter.export(model, paths[name], input=input_config(model), options=settings.only(exporter.uses))
    return paths
