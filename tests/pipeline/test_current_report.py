"""The report of a run folder always shows the files that are in it."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from command_line import RECIPE, copy_run, images
from PIL import Image

from vitcompress import cli
from vitcompress.bench.report.measurements import describe_speedup, find_speed, match_rows, pairs, speed_rows
from vitcompress.bench.report.page import write_report
from vitcompress.bench.report.records import SpeedRecord
from vitcompress.bench.report.run import markdown, read_report
from vitcompress.io.progress import SILENT
from vitcompress.io.run_folder import RunFolder
from vitcompress.pipeline.folder import dense_folder_of_run
from vitcompress.pipeline.report import current_report, describe_agreement, record_bench
from vitcompress.verify.outputs import Comparison

SPEED = ("--protocol", "paper", "--batch", "2", "--warmup", "1", "--runs", "8")
WITHOUT_US = "import sys; sys.modules.update(dict.fromkeys(['vitcompress', 'torch', 'timm'])); "


@pytest.fixture
def folder(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run without training, and the working folder around it."""
    monkeypatch.chdir(tmp_path)
    return copy_run(small_run)


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == code, result.output
    return result.stdout if "--json" in arguments else result.output


@pytest.fixture(scope="module")
def measured(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[..., Any]]:
    """A finished run with a file that takes bytes, and a function that measures files of it, once for equal words."""
    place = tmp_path_factory.mktemp("measured")

    @cache
    def measure(*words: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(place)
            return json.loads(call("bench", *words, "--batch", "3", "--warmup", "1", "--json"))

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        folder = copy_run(small_run).resolve()
        call("export", "run", "--uint8")
    return folder, measure


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    report = json.loads((folder / "report.json").read_text())
    assert (folder / "report.md").read_text() == markdown(report)
    return {entry["file"]: entry for entry in report["artifacts"]}


def run_snippets(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """What the code in report.md prints for each file, without vitcompress, torch and timm."""
    noise = np.random.default_rng(0).integers(0, 255, (30, 40, 3)).astype(np.uint8)
    Image.fromarray(noise).save(folder / "photo.jpg")
    code = dict(re.findall(r"### (\S+)\n\n```python\n(.*?)```", (folder / "report.md").read_text(), re.DOTALL))
    assert set(code) == set(names)
    printed = {}
    for name in names:
        command = [sys.executable, "-c", WITHOUT_US + "\n" + code[name]]
        printed[name] = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    return printed


def test_each_exported_file_has_a_row_and_code_that_runs(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.glob("*.onnx")}
    call("export", "run", "--uint8")
    call("export", "run", "--precision", "fp16", "--uint8")
    call("export", "run", "--format", "openvino")
    assert {name: (folder / name).read_bytes() for name in before} == before
    entries = rows(folder)
    assert {name: (entry["format"], entry["precision"], entry["input"]) for name, entry in entries.items()} == {
        "dense.onnx": ("onnx", "fp32", "float32"),
        "model.onnx": ("onnx", "fp32", "float32"),
        "model-uint8.onnx": ("onnx", "fp32", "uint8"),
        "model-fp16-uint8.onnx": ("onnx", "fp16", "uint8"),
        "model.xml": ("openvino", "fp32", "float32"),
    }
    agreement = {name: entry["agreement"] for name, entry in entries.items()}
    assert all(re.match(r"passed, .*\d+ of", text) for text in agreement.values()), agreement
    printed = run_snippets(folder, list(entries))
    assert len({printed[name] for name in ("model.onnx", "model-uint8.onnx", "model.xml")}) == 1
    names = {check["name"] for check in json.loads((folder / "verify.json").read_text())["checks"]}
    assert "agreement.model-uint8.onnx.flips" in names and "onnx.model-uint8.checker" in names
    call("verify", "run")


def test_an_export_replaces_no_file_of_another_kind(folder: Path) -> None:
    before = (folder / "model.onnx").read_bytes()
    assert "another format, precision or input" in call("export", "run", "--uint8", "--out", "run/model.onnx", code=2)
    assert "dense model" in call("export", "run", "--out", "run/dense-2.onnx", code=2)
    assert "compressed model" in call("export", "run", "--dense", "--out", "run/model-2.onnx", code=2)
    assert (folder / "model.onnx").read_bytes() == before
    call("export", "run")  # the same file again


def test_the_dense_model_is_exported_with_the_same_options(folder: Path) -> None:
    before = (folder / "dense.onnx").read_bytes()
    call("export", "run", "--dense", "--precision", "fp16")
    call("export", "run", "--precision", "fp16")
    call("export", "run", "--dense")
    assert (folder / "dense.onnx").read_bytes() == before
    entries = rows(folder)
    assert entries["dense-fp16.onnx"]["agreement"].startswith("passed")
    assert entries["dense-fp16.onnx"]["bytes"] > entries["model-fp16.onnx"]["bytes"]
    call("bench", "run/dense-fp16.onnx", "run/model-fp16.onnx", *SPEED)
    page = (folder / "report.md").read_text()
    assert "| file size (fp16.onnx) |" in page and "speed-up (onnxruntime cpu fp16, batch 2)" in page
    shutil.rmtree(folder / "state/dense")
    assert "the dense model of run is missing" in call("export", "run", "--dense", code=2)


def test_a_speed_is_shown_for_the_measured_file_only(folder: Path) -> None:
    (folder / "bench.json").unlink()  # its measurement may be less disturbed than the new one
    call("bench", "run/dense.onnx", "run/model.onnx", "run", "timm:vit_tiny_patch16_224", *SPEED, "--threads", "1")
    entry = json.loads((folder / "bench.json").read_text())[0]
    names = ["dense.onnx", "model.onnx", "model.safetensors"]
    assert [row["artifact"] for row in entry["rows"]] == names and [r["b"] for r in entry["ratios"]] == names[1:]
    assert "timm" not in json.dumps([entry["warnings"], entry["disturbed"]])
    assert rows(folder)["model.onnx"]["speed"]["threads"] == 1
    assert "(batch 2, threads 1) |" in (folder / "report.md").read_text()
    text = "".join((folder / name).read_text() for name in ("bench.json", "report.json", "report.md", "report.html"))
    assert str(folder.resolve()) not in text
    call("export", "run", "--opset", "21")  # another file of the same name
    assert rows(folder)["model.onnx"]["speed"] is None
    assert rows(folder)["dense.onnx"]["speed"] is not None


@pytest.mark.parametrize(
    ("arguments", "disturbed", "replaced"),
    [
        (("dense.onnx", "model.onnx", "--runs", "8"), False, True),
        (("dense.onnx", "model.onnx", "model-uint8.onnx", "--runs", "8"), False, True),
        (("dense.onnx", "model.onnx", "--runs", "8"), True, False),
        (("dense.onnx", "model.onnx", "--runs", "3"), False, False),
        (("dense.onnx", "model.onnx", "--runs", "3"), True, False),
        (("model.onnx", "dense.onnx", "--runs", "8"), False, False),
        (("model-uint8.onnx", "model.onnx", "dense.onnx", "--runs", "8"), False, False),
        (("model.onnx", "--runs", "8"), False, False),
    ],
)
def test_a_worse_measurement_replaces_no_better_one(
    measured: tuple[Path, Callable[..., Any]],
    arguments: Sequence[str],
    disturbed: bool,
    replaced: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, measure = measured
    names = [f"run/{word}" if "onnx" in word else word for word in arguments]
    first = measure("run/dense.onnx", "run/model.onnx", "--runs", "8", "--protocol", "paper")
    later = measure("--protocol", "paper", *names)
    monkeypatch.chdir(tmp_path)
    folder = copy_run(source)
    RunFolder(folder).benchmark.unlink()
    for result, reasons in ((first, []), (later, ["busy"] * disturbed)):
        record_bench(["run"], {**result, "disturbed": reasons}, SILENT)
    samples = [entry["rows"][-1]["samples_ms"] for entry in json.loads((folder / "bench.json").read_text())]
    assert (first["rows"][-1]["samples_ms"] not in samples) is replaced and len(samples) == 2 - replaced
    (ratio,) = [cells for name, *cells in speed_rows(read_report(folder)["bench"]) if name.startswith("speed-up")]
    assert describe_speedup((later if replaced else first)["ratios"][0]) in ratio


def test_a_speed_with_transfers_is_not_in_the_table_of_files(folder: Path) -> None:
    """The table does not show transfers, so that it compared files with and without them."""
    report = read_report(folder)
    own = json.loads((folder / "bench.json").read_text())
    slow = [{**row, "transfers": True, "images_per_second": 1.0} for row in own[0]["rows"]]
    (folder / "bench.json").write_text(json.dumps([{**own[0], "rows": slow}, *own]))
    assert current_report(folder, report)["artifacts"] == report["artifacts"]


def test_a_speed_up_is_that_of_its_variant(folder: Path) -> None:
    """All variants of a folder have the same name in its report, which showed the figures of the last one."""
    dense = str(dense_folder_of_run(folder))
    measured = json.loads(call("bench", dense, "run", "--variants", "fp32,bf16", *SPEED, "--json"))
    entry, *_ = json.loads((folder / "bench.json").read_text())
    ((before, after, ratio),) = pairs([entry])
    assert [row["precision"] for row in (before, after)] == ["fp32", "fp32"]
    assert [row["samples_ms"] for row in (before, after)] == [measured["rows"][i]["samples_ms"] for i in (0, 2)]
    assert ratio["median"] == measured["ratios"][1]["median"]


def test_rows_of_equal_settings_name_their_files(folder: Path) -> None:
    (entry, *_) = json.loads((folder / "bench.json").read_text())
    dense, model = entry["rows"]
    names = ("model.onnx", "model-norm.onnx")  # such as with other fp32 layers
    entry["rows"] = [dense, *({**model, "artifact": name} for name in names)]
    entry["ratios"] = [{**entry["ratios"][0], "b": name} for name in names]
    labels = [label for label, *_ in speed_rows([entry])]
    assert len(set(labels)) == len(labels) == 6 and all("model-norm.onnx" in label for label in labels[3:])
    assert len({label.replace("model-norm.onnx", "model.onnx") for label in labels}) == 3


@pytest.mark.parametrize("name", ["report.md", "report.html"])
def test_a_page_that_was_removed_is_written_again(folder: Path, name: str) -> None:
    (folder / name).unlink()
    call("report", "run")
    assert (folder / name).is_file() and rows(folder)


def test_a_changed_file_has_no_figures(folder: Path) -> None:
    call("bench", "run/model.onnx", *SPEED)
    call("evaluate", "run/model.onnx")
    assert rows(folder)["model.onnx"]["accuracy"] and rows(folder)["model.onnx"]["speed"]
    (folder / "model.onnx").write_bytes((folder / "model.onnx").read_bytes()[:-9])
    call("verify", "run", code=1)
    entry = rows(folder)["model.onnx"]
    assert (entry["accuracy"], entry["speed"], entry["agreement"]) == (None, None, "the file has changed")


def test_changed_weights_are_noted_beside_their_figures(folder: Path) -> None:
    assert "other weights" not in call("report", "run")
    weights = RunFolder(folder).weights
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    note = "the figures of run may be those of other weights: model.safetensors: sha256 is "
    assert note in " ".join(call("report", "run").split())
    call("verify", "run", code=1)
    assert "1 failed" in call("report", "run"), "the report is still updated"


def test_an_accuracy_on_other_images_is_not_that_of_the_run(folder: Path) -> None:
    images("other", classes=10)
    output = call("evaluate", "run/model.onnx", "--data", "other")
    assert "not in the report of run" in output and rows(folder)["model.onnx"]["accuracy"] is None
    call("evaluate", "run/model.onnx", "run/dense.onnx")
    assert rows(folder)["dense.onnx"]["accuracy"]["total"] == rows(folder)["model.onnx"]["accuracy"]["total"]


def test_an_accuracy_is_that_of_the_run_on_the_same_images_alone(folder: Path) -> None:
    Path("small.toml").write_text(RECIPE)
    images("pictures", each=10)
    sizes = ("--set", "dense.batch_size=8", "--set", "finetune.batch_size=8")
    settings = ("--set", "data.heldout=0.3", "--mean", "0.4")  # the test images do not depend on them
    call("recipe", "small.toml", "--data", "pictures", "--out", "trained", *sizes, *settings)
    call("evaluate", "trained/dense.onnx", "--data", "pictures", "--mean", "0.4")  # the recorded one
    assert rows(Path("trained"))["dense.onnx"]["accuracy"]["total"] == 20
    before = rows(Path("trained"))["model.onnx"]["accuracy"]
    # the same images in another folder, as on another machine
    Path("pictures").rename("moved")
    call("export", "trained", "--precision", "fp16")
    assert "not in the report" not in call("evaluate", "trained/model-fp16.onnx", "--data", "moved")
    assert rows(Path("trained"))["model-fp16.onnx"]["accuracy"]["total"] == 20
    # as many images in the same folder, with other labels
    Path("moved").rename("pictures")
    for old, new in (("class0", "other"), ("class1", "class0"), ("other", "class1")):
        Path("pictures/val", old).rename(Path("pictures/val", new))
    assert "not in the report of trained" in call("evaluate", "trained/model.onnx")
    assert rows(Path("trained"))["model.onnx"]["accuracy"] == before
    next(Path("pictures/val/class0").iterdir()).unlink()
    output = call("evaluate", "trained/model.onnx")
    assert "not in the report of trained" in output and "of 19" in output
    assert rows(Path("trained"))["model.onnx"]["accuracy"] == before and before["total"] == 20
    # a folder of an earlier version, without hashes: the counts differ
    path = RunFolder(Path("trained")).accuracy
    old = {
        name: {k: v for k, v in one.items() if k != "images_digest"}
        for name, one in json.loads(path.read_text()).items()
    }
    path.write_text(json.dumps(old))
    Path("trained/manifest.json").unlink()
    assert "not in the report of trained" in call("evaluate", "trained/model.onnx")


def test_speeds_without_their_files_are_dropped() -> None:
    row = {"artifact": "/x/run/model.onnx", "sha256": "1"}
    other = {"artifact": "/x/run", "sha256": "2"}
    warnings = ["/x/run/model.onnx, batch 2: noisy", "/x/run, batch 2: noisy", "all: busy"]
    ratio = {"a": row["artifact"], "b": other["artifact"]}
    entry: Any = {"rows": [row, other], "ratios": [ratio], "warnings": warnings}
    entry |= {"notes": [], "disturbed": []}
    (own,) = match_rows([entry], {"1": ["copy.onnx", "model.onnx"]})
    assert (own["rows"], own["ratios"]) == ([{**row, "artifact": "model.onnx"}], [])
    assert own["warnings"] == ["model.onnx, batch 2: noisy", "all: busy"]
    assert match_rows([own], {"1": ["copy.onnx", "model.onnx"]}) == [own]
    assert match_rows([entry], {"3": ["model.onnx"]}) == []


@pytest.mark.parametrize(("disturbed", "rate"), [(["busy", ""], 2.0), (["", ""], 1.0), (["busy", "busy"], 1.0)])
def test_the_speed_of_a_file_is_that_of_an_undisturbed_measurement(disturbed: Sequence[str], rate: float) -> None:
    keys = dict.fromkeys(SpeedRecord.__annotations__)
    entries: Any = [
        {"disturbed": list(filter(None, [reason])), "rows": [{**keys, "sha256": "1", "images_per_second": float(n)}]}
        for n, reason in enumerate(disturbed, 1)
    ]
    speed = find_speed(entries, "1")
    assert speed is not None and speed["images_per_second"] == rate


@pytest.mark.parametrize(
    ("flips", "unexplained", "text"),
    [
        (0, 0, "passed, 1,040 of 1,040 images"),
        (5, 0, "passed, 1,040 of 1,040 images (5 in another class)"),
        (5, 2, "passed, 1,038 of 1,040 images (5 in another class)"),
    ],
)
def test_an_agreement_counts_the_images_in_another_class(flips: int, unexplained: int, text: str) -> None:
    for place in ("", "; fp32 in torch (1 thread)"):
        detail = Comparison(1040, flips, unexplained, 0.0, 0.0, 0.0, 0.0).describe_flips() + place
        checks = [{"name": "agreement.model.onnx.flips", "detail": detail}, {"name": "agreement.x", "detail": "y"}]
        assert describe_agreement("model.onnx", {"verification": {"verdict": "passed", "checks": checks}}) == text


def test_a_limit_that_another_file_missed_is_not_missed_here() -> None:
    files = {"1": "dense.onnx", "2": "model.onnx", "3": "/elsewhere/slow.onnx"}
    rows = [{"artifact": name, "sha256": sha256} for sha256, name in files.items()]
    about: Any = {"warnings": [], "notes": [], "disturbed": [], "rows": rows, "fail_under": 1.4, "passed": False}
    lower = {"model.onnx": 1.5, "/elsewhere/slow.onnx": 1.3}
    ratios = [{"a": "dense.onnx", "b": name, "ci95": [low, 9.0]} for name, low in lower.items()]
    names = {sha256: [name] for sha256, name in files.items()}
    for known, passed in ((("1", "2"), True), (("1", "3"), False), (("1", "2", "3"), False)):
        (own,) = match_rows([{**about, "ratios": ratios}], {key: names[key] for key in known})
        assert own["passed"] is passed and len(own["ratios"]) == len(known) - 1


def test_an_accuracy_is_shown_for_the_file_that_it_was_counted_with(folder: Path) -> None:
    shares = {"top1": 0.5, "top5": 1.0, "top1_ci95": [0.0, 1.0]}
    unknown = {"correct": 1, "correct5": 2, "total": 2, "loss": 1.0, **shares}
    counts = {**unknown, "sha256": rows(folder)["model.onnx"]["sha256"]}
    (folder / "manifest.json").unlink()
    for entries, shown in (({"model.onnx": unknown}, None), ({"model.onnx": counts, "gone.onnx": counts}, counts)):
        (folder / "state/accuracy.json").write_text(json.dumps(entries))
        call("report", "run")
        assert rows(folder)["model.onnx"]["accuracy"] == shown
    call("export", "run", "--opset", "21")
    call("report", "run")
    assert rows(folder)["model.onnx"]["accuracy"] is None
    assert json.loads((folder / "report.json").read_text())["accuracy"] is None


class Page(HTMLParser):
    """Elements and addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]


BAD = [
    "<script>alert(1)</script>",
    "[c](javascript:1)",
    "a\n\n# b",
    "`x`",
    "&amp;",
    "<img src=x onerror=y>",
    "![i](h://x)",
]


def test_names_from_outside_are_text(folder: Path) -> None:
    report = json.loads((folder / "report.json").read_text())
    report |= {"recipe": BAD[0], "summary": BAD[1], "notes": BAD}
    report["model"]["classes"] = BAD
    report["tables"] = [{"title": BAD[2], "columns": ["a"], "rows": [[name] for name in BAD]}]
    report["artifacts"][0]["file"] = "".join(BAD)
    page = markdown(report)
    assert "<script" not in page.replace("'<script", "") and "\n# b" not in page  # but as a string in the code
    write_report(folder, report)
    text = (folder / "report.html").read_text()
    html = Page(text)
    assert not {"script", "a", "iframe", "link", "object"} & set(html.tags)
    assert html.tags.count("h1") == 1 and html.tags.count("img") == len(html.addresses) >= 1
    assert all(address.startswith("data:image/png;base64,") for address in html.addresses)
    for shown in ("&lt;script&gt;alert(1)", "[c](javascript:1)", "`x`", "&amp;amp;", "&lt;img src=x"):
        assert shown in text


def test_counts_of_no_images_are_rejected(folder: Path) -> None:
    counts = {"correct": 0, "correct5": 0, "total": 0, "loss": 1.0, "top1": 0.0, "top5": 0.0, "top1_ci95": [0.0, 1.0]}
    (folder / "state/accuracy.json").write_text(json.dumps({"dense": counts, "compressed": counts}))
    (folder / "manifest.json").unlink()
    result = CliRunner().invoke(cli.main, ["report", "run"])
    assert result.exit_code == 0 and "total: input should be greater than or equal to 1" in result.stderr


def test_the_comparison_explains_what_the_plot_lacks(folder: Path) -> None:
    shutil.copytree(folder, "other")
    data = json.loads((Path("other") / "report.json").read_text())
    data["model"]["input"]["mean"] = [0.1]  # the same weights with another normalization are another dense model
    counts = {"correct": 5, "correct5": 9, "total": 10, "loss": 1.0, "top1": 0.5, "top5": 0.9, "top1_ci95": [0.2, 0.8]}
    (Path("other") / "state/accuracy.json").write_text(json.dumps({"dense": counts, "compressed": counts}))
    (Path("other") / "report.json").write_text(json.dumps(data))
    (Path("other") / "manifest.json").unlink()
    measured = json.loads(call("bench", "run/dense.onnx", "run/model.onnx", *SPEED, "--json"))
    Path("b.json").write_text(json.dumps(measured))
    shown = json.loads(call("report", "run", "other", "--bench", "b.json", "--plot", "cmp.png", "--json"))
    assert list(shown["not_plotted"]) == ["run"] and "accuracy is not known" in shown["not_plotted"]["run"]
    assert [row[:2] for row in map(tuple, shown["table"]["rows"])] == [
        ("dense A", ""),
        ("run", "dense A"),
        ("dense B", ""),
        ("other", "dense B"),
    ]
    assert Path("cmp.png").is_file() and shown["plot"] == "cmp.png"
    Path("comparison.png").mkdir()  # so that no plot can be written
    again = json.loads(call("report", "run", "other", "--bench", "b.json", "--json"))
    assert again["plot"] is None and again["table"] == shown["table"]
    recorded = json.loads(call("report", "run", "--json"))["runs"]["run"]["bench"]
    assert shown["runs"]["run"]["bench"] == recorded, "each measurement once"
    del measured["machine"]
    Path("b.json").write_text(json.dumps(measured))
    error = call("report", "run", "--bench", "b.json", code=2)
    assert "no measurement: 0.machine: field required" in " ".join(error.replace("│", " ").split())
    assert "not in a plot: run" in call("report", "run", "other")
    assert "accuracy is not known" in call("report", "run", "--plot", "one.png", code=2)


def test_a_read_only_folder_is_a_note(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write read-only folders, so that the file is a folder here."""
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    output = call("bench", "run/model.onnx", *SPEED)
    assert "the report of run was not updated" in output
