"""The file and the options of a study: mistakes are reported before anything runs, and shipped studies are fair."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tiny_study import TINY
from whole_runs import SMALL

from vitcompress import cli, recipes
from vitcompress.errors import RecipeError
from vitcompress.io.progress import Progress
from vitcompress.pipeline.study import run
from vitcompress.pipeline.study.spec import epochs_outside_recovery, load_study


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a study."""
    path = tmp_path_factory.mktemp("studies") / "tiny.toml"
    path.write_text(TINY)
    return path


WITH_SIGN = TINY.replace("dense, trained on", "dense \u00b1")
TO_INT8 = ("pruned_layers = 2 }]", 'pruned_layers = 2 }]\nset = ["export.precision=int8"]')


class Rows(Progress):
    """Records updates."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, str]] = []

    def update(self, label: str, done: int, total: int, text: str = "") -> None:
        self.rows.append((done, total, text))


def error_of(*arguments: str) -> str:
    done = CliRunner().invoke(cli.main, ["study", *arguments, "--json"])
    assert done.exit_code == 2, done.output
    return str(json.loads(done.stdout)["error"])


def test_wrong_arguments_are_reported_and_nothing_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nearest = "digits, digits_int8"
    assert error_of("digit") == f"there is no study called 'digit', and no such file; nearest: {nearest}"
    assert error_of(str(tiny), "--seeds", "0") == "Invalid value for '--seeds': 0 is not in the range 1<=x<=1000."
    assert error_of(str(tiny), "--jobs", "0") == "Invalid value for '--jobs': 0 is not in the range 1<=x<=1000."
    assert error_of(str(tiny), "--rows", "contol") == "the study has no row 'contol', did you mean control?"
    assert error_of(str(tiny), "--rows", "zz1,yy2,xx3,ww4") == "the study has no row 'zz1'", "the first one"
    assert "speed.protocol" in error_of(str(tiny), "--set", "speed.protocol=often")
    half = "base.export={formats = ['onnx'], precision = 'bf16'}"
    assert "row control: its file is in bf16, for which CPUExecutionProvider" in error_of(str(tiny), "--set", half)
    assert "row random_2: pruned_layers is 9" in error_of(str(tiny), "--set", "row.1.step.0.pruned_layers=9")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("like=digits", "like   is only read from the file, --set changes summary, epochs, speed, base, options, row"),
        ("like=", "like   is only read from the file"),
        ("options.hetdpt.prunned_layers=2", "options.hetdpt.prunned_layers   unknown key, did you mean pruned_layers?"),
        ("options.nose.zz=2", "options.nose.zz   unknown key, known: "),
        ("options.random.atention=2", "row random_2: step.0.atention   unknown key, did you mean attention?"),
        ("options.nose.pruned_layers=1", "has no effect: no selected row has a step of the method nose"),
        ("options.random.pruned_layers=1", "has no effect: no selected row has a step of the method random"),
        ("options.random.atention=", "=   has no effect: atention is not set, did you mean attention?"),
        ("options.randm.attention=", "=   has no effect: randm is not set, did you mean random?"),
        ("base.finetune.lrr=", "--set base.finetune.lrr=   has no effect: lrr is not set, did you mean lr?"),
        ("base.finetun.lr=", "--set base.finetun.lr=   has no effect: finetun is not set, did you mean finetune?"),
        ("row.1.step.0.atention=", "has no effect: atention is not set"),
        ("speed.batches=", "--set speed.batches=   has no effect: batches is not set, did you mean batch?"),
        ("epoch=", "--set epoch=   has no effect: epoch is not set, did you mean epochs?"),
    ],
)
def test_a_change_without_effect_is_rejected(tiny: Path, tmp_path: Path, change: str, words: str) -> None:
    path = tmp_path / "like.toml"
    path.write_text(f'like = "{tiny}"\nepochs = 7\n{TINY[TINY.index("[[row]]") :]}')
    error = error_of(str(path), "--dry-run", "--set", change)
    assert words in error and "(1 problem)" in error
    if change == "options.random.atention=2":
        words = "options.random.atention   unknown key, did you mean attention?"
        assert words in error_of(str(path), "--dry-run", "--set", change, "--rows", "control")


def test_the_default_of_a_key_and_an_option_of_a_selected_row_are_accepted(tiny: Path) -> None:
    _, row = load_study(str(tiny), ["base.dense.lr=", "speed.batch= ", "options.random.attention="]).rows
    assert row.recipe.dense is not None and row.recipe.dense.lr != 2e-3
    assert row.recipe.steps[0].options.attention is None
    _, row = load_study(str(tiny), ["options.random.attention=2", "row.1.step.0.pruned_layers=1"]).rows
    assert row.recipe.steps[0].options.attention == 2
    with pytest.raises(
        RecipeError, match="has no effect: no selected row has a step of the method random that takes it"
    ):
        load_study(str(tiny), ["options.random.attention=2"], ["control"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("epochs = 2\n", "epochs = 1\n"), "all 2 rows: epochs = 1 leaves 0 for the fine-tuning"),
        (("lr = ", "lrr = "), "all 2 rows: "),
        (("epochs = 2\n", ""), "epochs"),
        (('name = "random_2"', 'name = "control"'), "row control: there are two of this name"),
        (
            ('title = "two layers at random"', 'title = "dense, trained on"'),
            "row dense, trained on: there are two of this title",
        ),
        (('title = "two layers at random"', 'title = "dense"'), "row random_2.title   is that of the dense model"),
        (('name = "random_2"', 'name = "Random 2"'), "row.1.name"),
        (('["Control"]', '["Contrl"]'), "got 'Contrl', expected another row's curve, did you mean Control?"),
        (('["Control"]', '["random"]'), "row random_2.against   got 'random', expected another row's curve"),
        (("[options.random]", "[options.randm]"), "options.randm   there is no method 'randm', did you mean random?"),
        (("attention = 1", "atention = 1"), "row random_2: step.0.atention"),
        (("[options", "[[base.step]]\nmethod = 'fold'\n[options"), "base.step   has no effect: every row"),
        (("[base]", "[base]\nname = 'x'"), "base.name   has no effect: every row has its own"),
        (('distillation = "soft"', 'epochs = 3, distillation = "soft"'), "base.finetune.epochs"),
        (TO_INT8, "row random_2: export.formats   must contain onnx: "),
        (
            ("pruned_layers = 2 }]", 'pruned_layers = 2 }]\nset = ["finetune.epochs=3"]'),
            "row random_2.set finetune.epochs   follows from",
        ),
        (("pruned_layers = 2 }]", 'pruned_layers = 2 }]\nset = ["export.precison=int8"]'), "export.precison"),
        (("pruned_layers = 2 }]", 'pruned_layers = 2 }]\nset = ["quantize.epochs=1"]'), "quantize   has no effect"),
        (("threads = 1", "threads = 1, seed = 3"), "all 2 rows: run.seed   has no effect: "),
        (
            ("pruned_layers = 2 }]", 'pruned_layers = 2 }]\nset = ["run.seed=3"]'),
            "row random_2: run.seed   has no effect: ",
        ),
        (("epochs = 2\n", "epochs = 2\nlike = 3\n"), "like"),
        (("\n[speed]", 'like = "digits"\nspeed = 3\n[other]'), "speed   "),
    ],
)
def test_mistakes_in_the_file_are_reported(tiny: Path, tmp_path: Path, change: tuple[str, str], words: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(TINY.replace(*change))
    with pytest.raises(RecipeError) as caught:
        load_study(str(path))
    assert words in caught.value.message and "of the study" in caught.value.message


def test_a_study_has_rows(tiny: Path) -> None:
    assert "row   got [], expected a list of 1 or more" in error_of(str(tiny), "--set", "row=[]")


def test_a_row_trained_in_int8_gets_no_more_epochs(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "int8.toml"
    path.write_text(TINY.replace(*TO_INT8).replace("formats = []", 'formats = ["onnx"]'))
    sets = ["epochs=5", 'row.1.set=["export.precision=int8", "quantize.epochs=3"]']
    control, trained = load_study(str(path), sets).rows
    assert (control.recipe.finetune.epochs, control.recipe.export.precision) == (4, "fp32")
    assert (trained.recipe.finetune.epochs, trained.recipe.quantize.epochs) == (1, 3)
    with pytest.raises(RecipeError, match="row random_2: epochs = 4 leaves 0 for the fine-tuning"):
        load_study(str(path), ["epochs=4", sets[1]])


def test_a_study_takes_the_tables_of_another_except_its_own(tiny: Path, tmp_path: Path) -> None:
    rows = TINY[TINY.index("[[row]]") :]
    path = tmp_path / "like.toml"
    path.write_text(f'like = "{tiny}"\nepochs = 7\n[base.export]\nformats = ["onnx"]\n{rows}')
    first, like = load_study(str(tiny)), load_study(str(path))
    assert (like.epochs, like.speed) == (7, first.speed)
    for row, other in zip(first.rows, like.rows, strict=True):
        expected = replace(row.recipe, export=replace(row.recipe.export, formats=("onnx",)))
        finetune, summary = other.recipe.finetune, other.recipe.summary
        assert finetune.epochs == 6 and other.recipe == replace(expected, finetune=finetune, summary=summary)
    path.write_text(f'like = "digit"\nepochs = 7\n{rows}')
    assert error_of(str(path)).startswith("there is no study called 'digit', and no such file; nearest: digits")


def test_a_study_cannot_be_like_one_that_is_like_another(tiny: Path, tmp_path: Path) -> None:
    rows = TINY[TINY.index("[[row]]") :]
    second, third = tmp_path / "second.toml", tmp_path / "third.toml"
    second.write_text(f'like = "{tiny}"\nepochs = 7\n{rows}')
    third.write_text(f'like = "{second}"\nepochs = 3\n[base]\n{rows}')
    assert f"like   got '{second}', which itself is like '{tiny}': name that study" in error_of(str(third))


def test_a_dry_run_counts_the_cost_of_rows_and_writes_nothing(tiny: Path, tmp_path: Path) -> None:
    updates = Rows()
    result = run.dry_run_study(load_study(str(tiny)), run.StudyOptions(tmp_path / "s", seeds=2), updates)
    assert updates.rows == [(0, 2, "control"), (1, 2, "random_2"), (2, 2, "")]
    assert result.runs == 4 and [row["row"] for row in result.rows] == ["control", "random_2"]
    assert result.rows[0]["macs_ratio"] == 1 > result.rows[1]["macs_ratio"] and result.missing == []
    assert not list(tmp_path.iterdir())


def test_problems_of_some_rows_name_them(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run.dry_run_recipe

    def dry_run(recipe: Any, options: Any) -> Any:
        own = ["random has a problem"] if recipe.steps[0].method == "random" else []
        return replace(real(recipe, options), missing=["all have one", *own])

    monkeypatch.setattr(run, "dry_run_recipe", dry_run)
    result = run.dry_run_study(load_study(str(tiny)), run.StudyOptions(tmp_path / "s", seeds=1))
    assert result.missing == ["all have one", "row random_2: random has a problem"]


def test_progress_of_a_dry_run_is_not_on_standard_output(tiny: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.main, ["study", str(tiny), "--dry-run", "--json", "--out", str(tmp_path / "s")])
    assert done.exit_code == 0 and "rows checked  2/2" in done.stderr
    assert [row["row"] for row in json.loads(done.stdout)["rows"]] == ["control", "random_2"]


@pytest.mark.parametrize("name", recipes.study_names())
def test_shipped_studies_give_every_row_the_same_training(name: str) -> None:
    loaded = load_study(name)
    assert {epochs_outside_recovery(r.recipe) + r.recipe.finetune.epochs for r in loaded.rows} == {loaded.epochs}
    assert len({replace(r.recipe.finetune, epochs=1) for r in loaded.rows if r.recipe.finetune}) == 1
    assert len({(r.recipe.dense, r.recipe.data) for r in loaded.rows}) == 1
    opening = [line.removeprefix("#").strip() for line in recipes.study_text(name).splitlines() if line.startswith("#")]
    assert any(line.startswith(f"vitcompress study {name}") for line in opening)
    assert any(not row.against for row in loaded.rows)  # a baseline


def test_a_recipe_is_no_study_and_a_study_no_recipe(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.parent)
    Path("small.toml").write_text(SMALL)
    wrong = [("study", "small.toml"), ("study", "digits_hetdpt"), ("recipe", tiny.name), ("recipe", "digits")]
    for command, source in wrong:
        done = CliRunner().invoke(cli.main, [command, source, "--dry-run", "--json"])
        other = {"study": "recipe", "recipe": "study"}[command]
        error = json.loads(done.stdout)
        assert (done.exit_code, error["error"]) == (2, f"{source} is a {other}, not a {command}")
        assert error["hint"] == f"`vitcompress {other} {source}` runs it"


@pytest.mark.parametrize(
    "change",
    [
        "model.args.depth=3",
        ".model.args.depth=3",
        "model[args][depth]=3",
        "dense.lr=1e-3",
        "dense=",
        " data.source=tinted",
        "run={device='cpu', threads=1, amp='bf16'}",
    ],
)
def test_a_row_cannot_change_the_dense_model_of_all_rows(change: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(TINY + f"set = {json.dumps([change])}\n")
    message = r"row random_2\.set   changes model, data, dense or run\.amp, which all rows share"
    with pytest.raises(RecipeError, match=message):
        load_study(str(path))


@pytest.mark.parametrize("change", ["finetune[epochs]=50", " finetune . epochs = 50", "finetune={lr=1e-3, epochs=50}"])
def test_a_row_cannot_set_the_epochs_that_follow_from_the_total(change: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(TINY + f"set = {json.dumps([change])}\n")
    with pytest.raises(
        RecipeError, match=r"row random_2\.set finetune\.epochs   follows from the study's total: set epochs instead"
    ):
        load_study(str(path))


def test_a_row_may_replace_other_tables_and_set_what_the_base_has(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    sets = ["finetune.lr=1e-4", "finetune.warmup_epochs=0", "run.threads=2", "bench.runs=3"]
    path.write_text(TINY + f"set = {json.dumps(sets)}\n")
    control, row = (row.recipe for row in load_study(str(path)).rows)
    assert (row.finetune.lr, row.finetune.epochs, row.run.threads) == (1e-4, control.finetune.epochs, 2)
    assert row.model == control.model


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("utf-8", "\u00b1".encode()), ("ascii", rb"\xb1"), ("iso8859-5", rb"\xb1")],
)
def test_a_character_that_the_terminal_lacks_is_printed_as_its_code(
    tmp_path: Path, encoding: str, shown: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.toml").write_text(WITH_SIGN, encoding="utf-8")
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding))
    with pytest.raises(SystemExit) as ended:
        cli.main(["study", str(tmp_path / "tiny.toml"), "--dry-run"])
    sys.stdout.flush()
    assert (ended.value.code, b"dense " + shown in printed.getvalue()) == (0, True)


def test_a_character_that_the_language_of_the_terminal_lacks_is_printed_as_its_code(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(WITH_SIGN, encoding="utf-8")
    words = [sys.executable, "-m", "vitcompress", "study", "tiny.toml", "--dry-run"]
    settings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(words, cwd=tmp_path, env={**os.environ, **settings}, capture_output=True)
    assert (done.returncode, rb"dense \xb1" in done.stdout) == (0, True), done.stderr
