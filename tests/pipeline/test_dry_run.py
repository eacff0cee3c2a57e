"""A dry run ends with the exit code with which the run would start, and notes what it cannot check."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from command_line import begin, expect_error, images, tree
from tiny_study import TINY

from vitcompress import cli
from vitcompress.errors import WeightsError
from vitcompress.models.weights import check_hub

LATENCY = ["--set", "step.0.target=latency", "--set", "step.0.amount=0.5"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path / "home", monkeypatch)


def dry_run(code: int, *words: str) -> dict[str, Any]:
    """The JSON of a dry run that ends with `code` and writes nothing."""
    before = tree(Path())
    done = CliRunner().invoke(cli.main, [*words, "--dry-run", "--json"])
    assert done.exit_code == code, done.output
    assert tree(Path()) == before
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


@pytest.mark.parametrize(
    "words",
    [
        ["--weights", "hub"],  # 1000 classes
        ["--device", "cuda:99"],
        ["--out", "taken"],
        ["--set", "finetune.batch_size=5000"],
        ["--set", "model.args.in_chans=4"],
        ["--set", "finetune.teacher=deit_tiny_patch16_224"],  # from the hub, 1000 classes
        ["--set", "finetune.teacher=deit_tyni_patch16_224"],
        ["--set", "finetune.teacher=vit_tiny_patch16_224", "--set", "finetune.teacher_weights=none.pth"],
        pytest.param(["--export", "trt"], marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU")),
    ],
    ids=lambda words: " ".join(words),
)
def test_a_dry_run_lists_what_a_run_is_rejected_for(words: list[str]) -> None:
    Path("taken").mkdir()
    Path("taken", "thesis.txt").write_text("")
    arguments = ["recipe", "small.toml", *(["--set", "finetune.distillation=soft"] if "teacher" in words[-1] else [])]
    error = expect_error(*arguments, *words).splitlines()[0]
    result = dry_run(2, *arguments, *words)
    assert any(line.startswith(error) for line in result["missing"]), (error, result["missing"])


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_too_little_shared_memory_for_workers_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: usage(path)._replace(free=10**4 if "shm" in str(path) else 10**12)
    )
    words = ["recipe", "digits_hetdpt", "--set", "data.workers=3"]  # of 2 batches of 32 images of 64 bytes
    assert dry_run(2, *words)["missing"][0].startswith("the workers need 0.0 MB of shared memory")
    assert dry_run(0, *words[:-1], "data.workers=2")["missing"] == []


def test_missing_files_are_listed_together() -> None:
    words = ["recipe", "small.toml", "--data", "nowhere", "--weights", "none.pth"]
    data, weights = dry_run(2, *words)["missing"]
    assert "nowhere does not exist" in data and f"no weights at {Path.cwd() / 'none.pth'}" in weights
    assert "does not exist" in expect_error(*words)


def test_downloads_are_notes() -> None:
    result = dry_run(0, "recipe", "small.toml", "--weights", "hub", "--set", "model.new_head=true")
    assert result["missing"] == [] and "first downloads" in " ".join(result["notes"])
    assert dry_run(0, "recipe", "small.toml")["notes"] == []


def test_without_training_the_weights_of_a_trained_model_are_random() -> None:
    for weights in ([], ["--weights", "train"]):
        result = dry_run(0, "recipe", "small.toml", "--structure-only", *weights)
        assert not [stage for stage in result["stages"] if stage["epochs"]]


def test_a_warm_up_longer_than_the_training_is_a_note() -> None:
    (note,) = dry_run(0, "recipe", "small.toml", "--set", "finetune.warmup_epochs=9")["notes"]
    assert note == "warmup_epochs is 9 of 1 epochs: the learning rate never peaks."


def test_a_final_learning_rate_above_the_peak_is_a_note() -> None:
    """Of the fine-tuning here, and of any other training, such as one in eight bits with a tenth of its rate."""
    (note,) = dry_run(0, "recipe", "small.toml", "--set", "finetune.lr=1e-6")["notes"]
    assert note == "min_lr is 1e-05, the peak 1e-06: the learning rate stays at the peak."


def test_a_rate_of_stochastic_depth_among_the_arguments_of_the_model_is_a_note() -> None:
    """Trainings set the rate of every block."""
    (note,) = dry_run(0, "recipe", "small.toml", "--set", "model.args.drop_path_rate=0.2")["notes"]
    assert note == "model.args.drop_path_rate has no effect: drop_path of [dense] and [finetune] is the rate."
    words = ["recipe", "small.toml", "--set", "model.args.drop_path_rate=0.0", "--set", "finetune.drop_path=0.2"]
    assert dry_run(0, *words)["notes"] == []


def test_training_options_of_the_file_without_effect_are_notes() -> None:
    """Those of `--set` are rejected, but it may choose what leaves options of the file without effect."""
    Path("own.toml").write_text(Path("small.toml").read_text().replace("[finetune]", "[finetune]\nmin_lr = 0.1"))
    words = ["recipe", "own.toml", "--set", "finetune.schedule=constant"]
    assert dry_run(0, *words)["notes"] == ["finetune.min_lr has no effect: schedule is 'constant'."]
    assert dry_run(0, *words, "--structure-only")["notes"] == []


def test_an_impossible_step_is_named_if_there_are_several() -> None:
    words = ["recipe", "digits_hetdpt_plus", "--dry-run", "--set", "step.3.align.residual=128"]
    error = expect_error(*words)
    assert error.startswith("step 4, isomorphic: residual widths must be multiples of 128, but residual has only 64")


def test_files_that_this_machine_cannot_run_are_a_note() -> None:
    (note,) = dry_run(0, "recipe", "small.toml", "--device", "cpu", "--set", "export.precision=bf16")["notes"]
    assert note.startswith("ONNX files are not evaluated and not measured: a file is in bf16, for which CPUExecution")


def test_costs_need_no_data() -> None:
    result = dry_run(0, "recipe", "deit_s_hetdpt")
    assert result["missing"] == [] and result["notes"][0] == "no data folder is set: set it with --data PATH"
    assert result["cost"]["compressed"]["params"] < result["cost"]["dense"]["params"]
    expect_error("recipe", "deit_s_hetdpt")
    assert dry_run(0, "recipe", "deit_s_hetdpt", "--export", "onnx", "--set", "export.precision=int8")["missing"] == []


def test_the_hint_for_int8_without_training_can_be_followed() -> None:
    words = ["recipe", "small.toml", "--structure-only", "--set", "quantize.epochs=1", "--export", "onnx"]
    (problem,) = dry_run(2, *words, "--set", "export.precision=int8")["missing"]
    hint = problem.partition("or use ")[2]
    assert hint == "--set export.precision=fp32 --set quantize="
    dry_run(0, *words, *hint.split())


@pytest.mark.parametrize("name", ["magnitude", "hetdpt_plus"])
def test_every_step_is_a_stage(name: str) -> None:
    """Also those without trainings and measurements, such as `fold`."""
    stages = " ".join(row["stage"] for row in dry_run(0, "recipe", f"digits_{name}")["stages"])
    steps = ["magnitude"] if name == "magnitude" else ["2. recover", "3. fold", "4. isomorphic"]
    assert [step for step in steps if step not in stages] == []


def test_trainings_are_listed_in_their_order() -> None:
    eight_bits = ["--set", "export.precision=int8", "--set", "quantize.epochs=2"]
    stages = dry_run(0, "recipe", "digits_magnitude", "--control", *eight_bits)["stages"]
    epochs = {row["stage"]: row["epochs"] for row in stages if row["epochs"] is not None or row["stage"] == "fold"}
    after = ["fine-tune the pruned model", "fold", "train the folded model in int8", "train the control"]
    assert list(epochs)[1:] == after and epochs["train the folded model in int8"] == 2


def test_a_note_tells_that_a_latency_is_not_checked() -> None:
    (note,) = dry_run(0, "recipe", "digits_isomorphic", *LATENCY)["notes"]
    assert note.startswith("Step 1 prunes to 0.5 ms on onnxruntime, which a dry run does not check")


def test_a_finished_run_needs_no_data() -> None:
    images("pictures", each=10)
    words = ["recipe", "small.toml", "--data", "pictures", "--set", "bench.runtimes=[]", "--set", "export.formats=[]"]
    words += ["--set", "dense.batch_size=8", "--set", "finetune.batch_size=8"]
    assert CliRunner().invoke(cli.main, words).exit_code == 0
    shutil.rmtree("pictures")
    assert CliRunner().invoke(cli.main, words).exit_code == 0
    assert "all is done" in dry_run(0, *words)["notes"][0]
    assert "pictures" in dry_run(2, *words, "--fresh")["missing"][0]
    words[3] = "nowhere"  # the folder of the run is not the reason
    assert "nowhere does not exist" in dry_run(2, *words)["missing"][0]
    assert "nowhere does not exist" in expect_error(*words)


def test_a_study_has_the_same_dry_run() -> None:
    Path("tiny.toml").write_text(TINY)
    assert dry_run(0, "study", "tiny.toml")["missing"] == []
    words = ["study", "tiny.toml", "--set", "base.run.device=cuda:99"]
    result = dry_run(2, *words)
    assert result["missing"][0] in expect_error(*words)


def test_missing_hub_weights_are_reported_without_the_network() -> None:
    with pytest.raises(WeightsError, match="no weights of vit_small_patch16_18x2_224"):
        check_hub("vit_small_patch16_18x2_224", None, new_head=False)
    check_hub("deit_tiny_patch16_224", 1000, new_head=False)
