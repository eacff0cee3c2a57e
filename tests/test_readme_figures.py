"""The tables of both READMEs equal the JSON files in bench/results, to the digits that they show."""

import json
import re
from collections.abc import Iterable
from functools import cache, reduce
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from vitcompress.bench.report import run
from vitcompress.bench.timing import median_interval

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "bench/results/README.md")}

# Row of a README -> file and figure, where the words are not those of the JSON file.
WIDTHS = {
    "`deit_b_sero`, unaligned widths": "deit_b_sero unaligned",
    "`deit_b_sero`, uniform (the default)": "deit_b_sero uniform",
    "`deit_b_sero`, q/k and v tied": "deit_b_sero tied",
    "`deit_b_sero`, padded to one head width": "deit_b_sero padded",
    "`deit_iso_2_6g`, widths as released (`round_to=2`)": "deit_iso_2_6g as released",
    "`deit_iso_2_6g`, aligned (the default)": "deit_iso_2_6g aligned",
    "`hetdpt_plus_2_4g`, as released": "hetdpt_plus_2_4g as released",
    "`hetdpt_plus_2_4g`, aligned (the default)": "hetdpt_plus_2_4g aligned",
}
RATIOS = {
    "throughput, dense DeiT-T: our ONNX file over timm's own export": (
        "dense",
        "deit_tiny_patch16_224, our ONNX over timm's own ONNX",
    ),
    "throughput, dense DeiT-S: our ONNX file over timm's own export": (
        "dense",
        "deit_small_patch16_224, our ONNX over timm's own ONNX",
    ),
    "throughput, DeiT-S in OpenVINO over timm's ONNX, fp32": (
        "dense",
        "deit_small_patch16_224, OpenVINO fp32 over timm's own ONNX",
    ),
    "throughput, DeiT-S in OpenVINO over timm's ONNX, bf16": (
        "dense",
        "deit_small_patch16_224, OpenVINO bf16 over timm's own ONNX",
    ),
}
# Rows of the study's tables, in the order of their columns.
STUDY = {
    "0.55": ("hetdpt_5", "sero_45", "upvit_48", "isomorphic_55", "hetdpt_plus_55"),
    "0.35": ("hetdpt_8", "sero_65", "upvit_48_4", "isomorphic_35", "hetdpt_plus_35"),
    "0.12": ("hetdpt_10", "sero_88", "upvit_32_3", "isomorphic_12", "hetdpt_plus_12"),
}

# Machine on which int8 and bf16 were measured -> section with its two tables.
SECTIONS = {"epyc": "### int8 and bf16", "xeon-amx": "### With AMX"}
# The same for the studies in int8: methods, and their rows.
METHODS = ("HetDPT", "SERo", "UP-ViT", "isomorphic", "HetDPT+")
INT8 = {
    "digits": ("hetdpt_int8", "sero_int8", "upvit_int8", "isomorphic_int8", "hetdpt_plus_int8"),
    "tinted": ("hetdpt_4", "sero_50", "upvit_72_5", "isomorphic_50", "hetdpt_plus_50"),
}


@cache
def content(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return data


def speeds(part: str, machine: str = "epyc") -> dict[str, dict[str, Any]]:
    return {figure["what"]: figure for figure in content(f"speed-{part}-{machine}-1-thread.json")["figures"]}


def int8_speeds(machine: str) -> dict[str, dict[str, Any]]:
    """With those of a recipe that was changed, and measured again."""
    return speeds("int8", machine) | speeds("int8-sero", machine)


def rows(text: str, start: str) -> list[list[str]]:
    """Cells of every table row whose first cell begins with `start`."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in cells] for cells in lines if cells[0].startswith(start)]


def between(ends: Iterable[float]) -> str:
    return " to ".join(f"{end:.3f}" for end in ends)


def test_the_first_table_is_the_report_of_the_committed_run() -> None:
    table = run.summary_table(content("digits_hetdpt-epyc-2-cores.json"))
    names = (("onnxruntime cpu", "ONNX Runtime,"), ("torch cpu", "torch,"), ("(onnx)", "(ONNX)"))
    reported = {reduce(lambda label, name: label.replace(*name), names, row[0]): row for row in table.rows}
    shown = TEXTS["README.md"].split("| | before | after | change |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(shown) == 9
    for line in shown:
        label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        assert cells == [cell.removesuffix(": faster") for cell in reported[label][1:]], label


def test_realised_speeds() -> None:
    known = speeds("realised") | speeds("widths")
    speed_rows = [row for row in rows(TEXTS["bench/results/README.md"], "`") if len(row) == 5 and row[1].endswith("x")]
    assert len(speed_rows) >= 7
    for label, *cells in speed_rows:
        figure = known[f"realised {WIDTHS.get(label, label.strip('`'))}"]
        speed, macs, ratio = f"{figure['speedup']:.2f}x", f"{figure['macs_ratio']:.3f}", f"{figure['ratio']:.3f}"
        assert cells == [speed, macs, ratio, between(figure["ci95"])], label


def test_speeds_that_the_readme_quotes() -> None:
    defaults = ("deit_s_hetdpt", "deit_b_hetdpt", "nose_deit_s_4", "deit_b_sero uniform", "up_deit_s")
    known = speeds("realised") | speeds("widths")
    figures = [known[f"realised {name}"] for name in (*defaults, "deit_iso_2_6g aligned", "hetdpt_plus_2_4g aligned")]
    ratios = [figure["ratio"] for figure in figures]
    text = " ".join(TEXTS["README.md"].split())
    assert f"are {min(ratios):.3f} to {max(ratios):.3f} of this MACs ratio" in text
    for figure, name in ((figures[0], "deit_s_hetdpt"), (figures[-1], "hetdpt_plus_2_4g")):
        assert f"{figure['speedup']:.2f}x for `{name}`" in text


def test_ratios_of_what_it_costs() -> None:
    text = TEXTS["bench/results/README.md"]
    for label, (part, what) in RATIOS.items():
        ((_, *cells),) = rows(text, label)
        figure = speeds(part)[what]
        assert cells == [f"{figure['ratio']:.3f}", between(figure["ci95"])], label
    assert {row[0] for row in rows(text, "time of") + rows(text, "throughput")} == {*RATIOS}


GPU_FORMS = ("torch fp16", "torch fp16+compile", "onnx fp16")  # columns of the first table
GPU_ROWS = {
    "torch fp16": "torch fp16",
    "torch fp16, CUDA graph": "torch fp16+graph",
    "torch fp16, compiled": "torch fp16+compile",
    "torch bf16": "torch bf16",
    "torch TF32": "torch tf32",
    "torch fp32": "torch fp32",
    "ONNX Runtime fp16": "onnx fp16",
    "ONNX Runtime TF32": "onnx tf32",
}
TRAINING = {
    "fp32": "none",
    "amp fp16": "fp16",
    "amp bf16": "bf16",
    "amp bf16, activation checkpointing": "bf16, checkpointing",
    "amp bf16, `model.compile()`": "bf16, compiled",
}


def gpu_table(title: str) -> dict[str, list[str]]:
    table = TEXTS["bench/results/README.md"].split(title)[1].split("\n\n")[0].splitlines()[2:]
    return {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line[1:-1].split("|")] for line in table)}


def test_speeds_on_a_gpu() -> None:
    known = {figure["what"]: figure for figure in content("gpu-h100.json")["figures"]}
    table, torch_shares = gpu_table("| structure | MACs ratio | torch |"), dict[str, float]()
    assert {name.split("`")[1] for name in table} == {what.split(", ")[0] for what in known if "torch fp16" in what} - {
        "giant",
        "harness",
    }
    for label, (macs, *cells) in table.items():
        name = label.split("`")[1]
        figures = [known.get(f"{name}, {form}") for form in GPU_FORMS]
        assert cells == ["" if f is None else f"{f['speedup']:.2f}x ({f['ratio']:.2f})" for f in figures], label
        first = known[f"{name}, {GPU_FORMS[0]}"]
        assert macs == f"{first['macs_ratio']:.2f}" and first["ratio"] * first["macs_ratio"] == pytest.approx(
            first["speedup"]
        )
        torch_shares[name] = first["ratio"]
    text = " ".join(TEXTS["README.md"].split())
    depth = [share for name, share in torch_shares.items() if name.endswith("hetdpt") or name.startswith("nose")]
    width = [share for name, share in torch_shares.items() if share not in depth]
    assert f"realizes {min(depth):.2f} to {max(depth):.2f} of the MACs ratio for depth pruning" in text
    assert f"and only {min(width):.2f} to {max(width):.2f} for width pruning" in text
    for label, cells in gpu_table("| `deit_s_hetdpt` on a GPU | dense").items():
        figure = known[f"deit_s_hetdpt, {GPU_ROWS[label]}"]
        shares = figure["share_of_peak"]
        rates = [f"{rate:.0f} ({100 * shares[name]:.0f} %)" for name, rate in figure["images_per_second"].items()]
        assert cells == [*rates, f"{figure['speedup']:.2f}x", f"{figure['ratio']:.3f}"], label


def test_patch_embeddings_on_a_gpu() -> None:
    known = {figure["what"]: figure.get("ms", {}) for figure in content("gpu-h100-patches.json")["figures"]}
    for label, cells in gpu_table("| fp16 on a GPU, ms |").items():
        runtime, _, form = label.partition(", ")
        figures = [known[f"deit_s_hetdpt, {model}, {runtime} fp16"] for model in ("dense", "pruned")]
        assert cells == [f"{figure[form]:.2f}" for figure in figures], label


def test_training_steps_on_a_gpu() -> None:
    known = {figure["what"]: figure for figure in content("gpu-h100.json")["figures"]}
    table = gpu_table("| training step on a GPU |")
    assert set(table) == set(TRAINING)
    for label, cells in table.items():
        figure = known[f"training step, {TRAINING[label]}"]
        share, memory = f"{100 * figure['share_of_peak']:.1f} %", f"{figure['peak_bytes'] / 2**30:.1f} GiB"
        assert cells == [f"{figure['images_per_second']:.0f}", share, memory], label


def test_accuracies_of_the_study() -> None:
    text = TEXTS["bench/results/README.md"]
    study = {row["row"]: row for row in content("study-digits-epyc-2-cores.json")["rows"]}
    for share, names in STUDY.items():
        (cells, *_) = (row for row in rows(text, share) if "±" in row[1])
        assert cells[1:] == [
            f"{100 * study[row]['top1_mean']:.1f} ± {100 * study[row]['top1_std']:.1f}" for row in names
        ], share
        within = [study[row]["macs_ratio"] for row in names]
        shares = [float(number) for number in re.findall(r"0\.\d\d", cells[0])]
        assert shares[:2] == [round(min(within), 2), round(sorted(within)[3 if len(shares) > 2 else 4], 2)], share
        assert shares[2:] in ([], [round(study["hetdpt_10"]["macs_ratio"], 2)])
    control = study["control"]
    assert f"{100 * control['top1_mean']:.1f} ± {100 * control['top1_std']:.1f} %" in text


def test_speeds_of_the_study() -> None:
    study = {row["row"]: row for row in content("study-digits-epyc-2-cores.json")["rows"]}
    for share, names in STUDY.items():
        (cells,) = (row for row in rows(TEXTS["bench/results/README.md"], share) if " of " in row[1])
        expected = [f"{study[row]['speedup']:.2f} of {1 / study[row]['macs_ratio']:.2f}" for row in names]
        assert cells[1:] == expected, share


def tables(machine: str) -> list[str]:
    """The section with the speeds in int8 and bf16, split before its second table."""
    section = TEXTS["bench/results/README.md"].split(f"{SECTIONS[machine]}\n")[1].split("###")[0]
    return section.split("divided by the ratio of the MACs")


def test_amx_was_measured_with_amx() -> None:
    for name in ("int8", "int8-sero"):
        assert "amx_int8" in content(f"speed-{name}-xeon-amx-1-thread.json")["machine"]["cpu_flags"]


@pytest.mark.parametrize("machine", SECTIONS)
def test_speeds_in_int8(machine: str) -> None:
    known = int8_speeds(machine)
    dense = {"dense DeiT-S": "deit_s_hetdpt: dense", "dense DeiT-B (distilled)": "deit_iso_2_6g: dense"}
    shown, _ = tables(machine)
    lines = [*rows(shown, "`"), *rows(shown, "dense ")]
    assert len(lines) == 26
    for model, file, *cells in lines:
        what = dense.get(model) or f"{model.strip('`')}: {model.strip('`')}"
        for cell, batch in zip(cells, (1, 8), strict=True):
            figure = known[f"{what}, {file}, batch {batch}"]
            low, high = figure["ci95"]
            assert cell == f"{figure['ratio']:.2f} ({low:.2f} to {high:.2f})", (model, file, batch)


@pytest.mark.parametrize("machine", SECTIONS)
def test_speeds_in_int8_over_the_ratio_of_the_macs(machine: str) -> None:
    known = int8_speeds(machine)
    _, shown = tables(machine)
    forms = ("ONNX Runtime fp32", "ONNX Runtime int8", "OpenVINO bf16", "OpenVINO int8+bf16")
    lines = rows(shown, "`")
    assert len(lines) == 5
    for name, *cells in ([line[0].strip("`"), *line[1:]] for line in lines):
        for form, cell in zip(forms, cells, strict=True):
            values = []
            for batch in (1, 8):
                figure = known[f"{name}: {name}, {form}, batch {batch}"]
                dense = known.get(f"{name}: dense, {form}, batch {batch}", figure)["samples_ms"][f"dense, {form}"]
                pairs = zip(dense, figure["samples_ms"][f"{name}, {form}"], strict=True)
                values.append(median(median(a) / median(b) for a, b in pairs) / figure["macs_ratio"])
            assert cell == " / ".join(f"{value:.2f}" for value in values), (name, form)


@pytest.mark.parametrize(
    ("part", "machine", "heading"),
    [("int8-avx2", "epyc", "### int8 without VNNI"), ("int8", "xeon-vnni", "### int8 with VNNI alone")],
)
def test_speeds_in_int8_without_bf16(part: str, machine: str, heading: str) -> None:
    """The int8 file over its own fp32 file, the dense fp32 file, and the dense int8 file, divided by the MACs ratio.

    With VNNI, also the file of OpenVINO over the dense fp32 file.
    """
    known = speeds(part, machine)
    flags = {*content(f"speed-{part}-{machine}-1-thread.json")["machine"]["cpu_flags"]}
    vnni = machine == "xeon-vnni"
    assert not flags & {"avx512_bf16", "amx_int8", "avx_vnni"} and vnni is ("avx512_vnni" in flags)
    shown = rows(TEXTS["bench/results/README.md"].split(heading)[1].split("###")[0], "`")
    assert [row[0].strip("`") for row in shown] == [*dict.fromkeys(what.partition(":")[0] for what in known)]
    for label, *cells in shown:
        name = label.strip("`")
        dense, own = "dense, ONNX Runtime fp32", f"{name}, ONNX Runtime int8"
        pairs = [(f"{name}, ONNX Runtime fp32", own, 1.0), (dense, own, 1.0), ("dense, ONNX Runtime int8", own, 0.0)]
        pairs += [(dense, f"{name}, OpenVINO int8", 1.0)] if vnni else []
        for cell, ((slow, fast, divisor), batch) in zip(cells, product(pairs, (1, 8)), strict=True):
            figures = [f for f in known.values() if f["what"].startswith(f"{name}: ") and f["batch"] == batch]
            times = {file: blocks for figure in figures for file, blocks in figure["samples_ms"].items()}
            ratio = divisor or figures[0]["macs_ratio"]
            rounds = zip(times[slow], times[fast], strict=True)
            middle, low, high = median_interval([median(a) / median(b) / ratio for a, b in rounds])
            assert cell == f"{middle:.2f} ({low:.2f} to {high:.2f})", (name, fast, slow, batch)


def test_the_advice_for_processors_with_vnni_alone() -> None:
    known = speeds("int8", "xeon-vnni")
    (advice,) = (line for line in TEXTS["README.md"].splitlines() if line.startswith("| processor with VNNI alone |"))
    shown = re.findall(r"([0-9.]+)x and ([0-9.]+)x", advice)
    files = ("deit_s_hetdpt: dense", "deit_s_hetdpt: deit_s_hetdpt", "deit_s_sero_70: deit_s_sero_70")
    for name, cells in zip(files, shown, strict=True):
        for batch, cell in zip((1, 8), cells, strict=True):
            fast, slow = (
                known[f"{name}, {form} int8, batch {batch}"]["ratio"] for form in ("OpenVINO", "ONNX Runtime")
            )
            assert cell == f"{fast:.1f}" and fast > slow, (name, batch)
    gains: dict[bool, list[float]] = {True: [], False: []}  # of pruned and of dense models
    for what, figure in known.items():
        if "OpenVINO int8" in what:
            other = known[what.replace("OpenVINO", "ONNX Runtime")]
            gains["dense" not in what].append(figure["ratio"] / other["ratio"])
    pruned, dense = (f"{min(values):.2f} to {max(values):.2f} times" for values in gains.values())
    text = " ".join(TEXTS["bench/results/README.md"].split())
    assert f"pruned models are {pruned} as fast in OpenVINO as in ONNX Runtime, the dense models {dense}." in text
    _, *widths = rows(TEXTS["bench/results/README.md"].split("### int8 with VNNI alone")[1].split("###")[0], "`")
    kept = [cell.partition(" ")[0] for row in widths for cell in row[5:7]]  # shares of the MACs ratio
    assert f"{min(kept)} to {max(kept)} with VNNI alone" in " ".join(TEXTS["README.md"].split())


def test_accuracies_and_flips_of_int8() -> None:
    for data, names in INT8.items():
        study = {row["row"]: row for row in content(f"study-{data}-int8-epyc.json")["rows"]}
        shown = rows(TEXTS["bench/results/README.md"], f"{data}, ")
        measured = {f"{data}, {label}": name for label, name in zip(METHODS, names, strict=True)}
        if data == "digits":
            measured |= {f"{label}, trained in int8": f"{name[:-5]}_trained" for label, name in measured.items()}
        assert [row[0] for row in shown] == [*measured]
        for name, (_, *cells) in zip(measured.values(), shown, strict=True):
            row = study[name]
            fp32 = (row["correct"] + row["only_model"] - row["only_file"]) / row["total"]
            flips = f"{row['flips']} of {row['total']} ({100 * row['flips'] / row['total']:.2f} %)"
            assert cells == [f"{100 * fp32:.1f}", f"{100 * row['top1_mean']:.1f}", flips, f"{row['p_value']:.2g}"], name


def test_cost_of_eight_bits() -> None:
    results, text = content("eight-bits-epyc.json"), " ".join(TEXTS["bench/results/README.md"].split())
    seconds = zip(results["seconds"]["quantize"], results["seconds"]["fp32_pass"], strict=True)
    assert f"takes {median(a / b for a, b in seconds):.2f} times as long as one pass" in text
    assert f"at most {results['peak_gib']:.1f} GiB of memory" in text
    shown = rows(TEXTS["bench/results/README.md"].split("| recipe | dense model | pruned model |")[1], "`")[:5]
    assert shown == [
        [f"`{name}`", *(f"{sizes[model]['int8'] / sizes[model]['fp32']:.3f}" for model in ("dense", name))]
        for name, sizes in results["bytes"].items()
    ]
    builds = [(engine["precision"], engine["sm"]) for engine in results["engines"]]
    assert builds == [*(("int8", sm) for sm in (80, 86, 89, 120)), *(("fp8", sm) for sm in (89, 120))]
    assert all(len(set(engine["sha256"])) == 1 for engine in results["engines"])
