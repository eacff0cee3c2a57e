"""Sizes, types and texts that nobody means: each is rejected with a short message before anything is computed."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from click.testing import CliRunner
from command_line import begin, copy_run, expect_error, tree
from safetensors.torch import save_file

from vitcompress import cli
from vitcompress.errors import ESCAPES, LONGEST_LINE, InputError
from vitcompress.exporters.sidecar import sidecar_path
from vitcompress.io.files import DEEPEST, parse_plain
from vitcompress.io.tensors import load_tensors
from vitcompress.models.create import create_model, create_on_meta

TINY = "vit_tiny_patch16_224"
NASTY = "a\x1b]0;title\x07\x9b2J\u202egnp\x00"


@pytest.fixture(scope="module")
def world(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run without training, without a manifest, that `verify` would compare files with."""
    with pytest.MonkeyPatch.context() as patch:
        begin(tmp_path_factory.mktemp("world") / "home", patch)
        (copy_run(small_run) / "manifest.json").unlink()
        return Path().resolve()


@pytest.fixture(autouse=True)
def home(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in tree(world):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((world / path).read_bytes())
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("run.seed=18446744073709551616000", "not a TOML value"),
        ("run.seed=9223372036854775808", "not a TOML value"),
        (f"run.seed={'1' * 5000}", "not a TOML value"),
        ("model.args.depth=100000", "got 100000, expected 256 or less"),
        ("model.args.depth=1000000000", "expected 256 or less"),
        ("model.args.img_size=1000000", "expected 16384 or less"),
        ("model.args.num_classes=-1", "got -1, expected 0 or more"),
        ("model.args.mlp_ratio=1e999", "finite"),
        ("model.args.checkpoint_path=other.pth", "checkpoint_path unknown key"),
        ("model.args.block_fn=Block", "block_fn unknown key"),
        ("model.args.global_pool=../../etc/passwd", "global_pool"),
        ('model.args.pretrained_cfg_overlay={hf_hub_id="x/y"}', "hf_hub_id unknown key"),
        ("model.args.pretrained_cfg_overlay={crop_pct=1e999}", "finite"),
        (f"model.args.x={'[' * 20_000}", "not a TOML value"),
        (f"model.args.x={'[' * 100}{']' * 100}", "not a TOML value"),
        (f"{'a.' * 5000}b=1", "expected table.key=value"),
        ("step.0.method=[1]", "there is no method"),
        ('step.0.method={a="hetdpt"}', "there is no method"),
        ("finetune.epochs=1000000000", "expected 100000 or less"),
        ("finetune.batch_size=9000000000000000000", "expected"),
        ("finetune.augmentation={no_aug=false,auto_augment='rand-m999-zzz'}", "auto_augment"),
        ("finetune.augmentation={no_aug=false,auto_augment='zzz'}", "auto_augment"),
        ("bench.batch=99999999999999999999", "not a TOML value"),
        ("bench.batch=9999999999999", "expected 1048576 or less"),
        ("bench.runs=9999999999999", "expected"),
        ("data.workers=100000000", "expected"),
        ("run.threads=100000000", "expected"),
        ("export.batch=[1,2,9999999999999]", "expected 1048576 or less"),
    ],
    ids=lambda value: value[:40],
)
def test_settings_out_of_any_range(setting: str, sentence: str) -> None:
    for extra in ((), ("--structure-only",)):
        done = CliRunner().invoke(cli.main, ["recipe", "small.toml", "--dry-run", *extra, "--json", "--set", setting])
        data = json.loads(done.stdout)
        message = "\n".join(data.get("missing", [])) or f"{data.get('error')}"
        if extra and "augmentation" in setting:
            continue  # nothing is trained
        assert done.exit_code == 2 and sentence in message and len(message) < 3 * LONGEST_LINE, message


@pytest.mark.parametrize(
    "text", ["1" * 5000, "[" * 20_000, "a = " + "[" * 5000 + "]" * 5000, '[model]\nname = "\\uD800"']
)
def test_toml_that_exhausts_its_parser(text: str) -> None:
    Path("deep.toml").write_text(f"x = {text}\n" if text[0] in "1[" and "model" not in text else text)
    assert "not valid TOML" in expect_error("recipe", "deep.toml", "--dry-run")


def test_pipes_and_devices() -> None:
    os.mkfifo("pipe.toml")
    os.mkfifo("pipe.json")
    for source in ("pipe.toml", "/dev/zero"):
        assert "not a file" in expect_error("recipe", source)
    assert "not a file" in expect_error("report", "run", "--bench", "pipe.json")
    assert "not a file" in expect_error("recipe", "small.toml", "--classes", "pipe.json")
    Path("run/plan.json").unlink()
    os.mkfifo("run/plan.json")
    assert "plan.json" in expect_error("evaluate", "run", "--data", "digits")


# ---------------------------------------------------------------------------------------------------------------- files


def reported(value: object) -> None:
    Path("run/report.json").write_text(json.dumps(value))


@pytest.mark.parametrize("value", [{}, None, [], 7, {"recipe": 1, "cost": {}}, {"recipe": "x", "cost": {"dense": 1}}])
@pytest.mark.parametrize("pictures", [(), ("--pictures", "drawn")], ids=["page", "pictures"])
def test_a_report_of_other_types(value: object, pictures: tuple[str, ...]) -> None:
    reported(value)
    assert "report.json" in expect_error("report", "run", *pictures)


@pytest.mark.parametrize("name", ["bench.json", "verify.json", "state/folding.json"])
def test_parts_of_a_report_of_other_types(name: str) -> None:
    Path("run", name).write_text('{"rows": 7, "checks": [7]}')
    done = CliRunner().invoke(cli.main, ["report", "run", "--json"])
    assert done.exit_code in (0, 2) and "bug in" not in done.output


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def changed_onnx(change: Callable[[Any], object]) -> str:
    model = onnx.load("run/model.onnx")
    change(model)
    onnx.save(model, "changed.onnx")
    return "changed.onnx"


def label(key: str, text: str) -> Callable[[Any], object]:
    return lambda model: onnx.helper.set_model_props(
        model, {**{e.key: e.value for e in model.metadata_props}, key: text}
    )


def sizes(*values: int | str) -> Callable[[Any], object]:
    def change(model: Any) -> None:
        for dim, value in zip(model.graph.input[0].type.tensor_type.shape.dim, values, strict=True):
            setattr(dim, "dim_param" if isinstance(value, str) else "dim_value", value)

    return change


def external(model: Any) -> None:
    tensor = model.graph.initializer[0]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="a\0b")


def long_name(model: Any) -> None:
    tensor = model.graph.initializer[0]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="x" * 300)
    tensor.ClearField("raw_data")  # which onnx.save would write


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (label("std", "[-1.0]"), "std is [-1.0]"),
        (label("std", "[0.0]"), "std is [0.0]"),
        (label("std", "[NaN]"), "std is"),
        (label("crop_pct", "1e999"), "crop_pct is inf"),
        (label("size", "[1, -8, 8]"), ""),
        (label("mean", nested(100_000)), "mean is"),
        (label("mean", "1" * 5000), "mean is"),
        (sizes(-1, 1, 8, 8), "its input images has a size -1, not in 0 to 16384"),
        (sizes(2**40, 1, 8, 8), "its input images has a size 1099511627776"),
        (sizes("b", 1, -1, 8), "its input images has a size -1"),
        (sizes("b", 1, 0, 8), ""),
        (sizes("b", 1, 8, 1 << 40), ""),
        (external, "outside its own folder"),
        (long_name, "beside it, which is missing"),
    ],
    ids=[
        "std",
        "std 0",
        "std NaN",
        "crop",
        "size",
        "nested",
        "digits",
        "batch -1",
        "batch 2^40",
        "height -1",
        "height 0",
        "width 2^40",
        "external",
        "long name",
    ],
)
def test_onnx_files(change: Callable[[Any], object], sentence: str) -> None:
    path = changed_onnx(change)
    before = tree(Path())
    done = CliRunner().invoke(cli.main, ["evaluate", path, "--data", "digits", "--json"])
    if sentence:
        assert done.exit_code == 2 and sentence in json.loads(done.stdout)["error"], done.output
    assert done.exit_code in (0, 2) and "bug in" not in done.output and tree(Path()) == before
    Path(path).replace("run/model.onnx")
    done = CliRunner().invoke(cli.main, ["verify", "run", "--json"])
    assert done.exit_code == 1 and "bug in" not in done.output and json.loads(done.stdout)["passed"] is False
    for command in ("bench", "evaluate"):
        done = CliRunner().invoke(cli.main, [command, "run/model.onnx", "--json"])
        assert done.exit_code in (0, 2) and "bug in" not in done.output


@pytest.mark.parametrize("text", ["float32", "[1]", '{"a": 1}'])
def test_a_sidecar_with_another_input(text: str) -> None:
    """The report is written from it, and must stay readable."""
    Path("run/manifest.json").unlink(missing_ok=True)
    known = json.loads(sidecar_path(Path("run/model.onnx")).read_text())
    sidecar_path(Path("run/model.onnx")).write_text(
        json.dumps({**known, "metadata": {**known["metadata"], "input": text}})
    )
    for command, code in (("verify", 1), ("report", 0)):
        done = CliRunner().invoke(cli.main, [command, "run", "--json"])
        assert done.exit_code == code and "bug in" not in done.output, done.output


def test_an_output_of_another_size_than_the_file_states() -> None:
    def change(model: Any) -> None:
        model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 0

    path = changed_onnx(change)
    assert "cannot run changed.onnx at batch 1" in expect_error("bench", path, "--batch", "1", "--runs", "1")


@pytest.mark.parametrize("kind", [torch.complex64, torch.float8_e4m3fn, torch.int8])
def test_weights_of_other_types(kind: torch.dtype) -> None:
    path = Path("run/model.safetensors")
    save_file({name: tensor.to(kind) for name, tensor in load_tensors(path).items()}, path)
    name = str(kind).removeprefix("torch.")
    assert f"is {name}" in expect_error("evaluate", "run", "--data", "digits")
    save_file({k: v.to(kind) for k, v in create_model(TINY, img_size).state_dict().items()}, "w.safetensors")
    assert f"is {name}" in expect_error("recipe", "small.toml", "--weights", "w.safetensors")


img_size: dict[str, object] = {
    "img_size": 8,
    "patch_size": 4,
    "in_chans": 1,
    "embed_dim": 16,
    "depth": 3,
    "num_heads": 2,
}


@pytest.mark.parametrize("layout", ["sparse", "meta"])
def test_tensors_without_plain_values(layout: str) -> None:
    state = create_model(TINY, {**img_size, "num_classes": 10}).state_dict()
    state["head.weight"] = state["head.weight"].to_sparse() if layout == "sparse" else state["head.weight"].to("meta")
    torch.save(state, "w.pth")
    assert "head.weight" in expect_error("recipe", "small.toml", "--weights", "w.pth")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("depth", 100_000, "expected 256 or less"),
        ("checkpoint_path", "/etc/passwd", "unknown key"),
        ("norm_layer", "os.system('x')", "should match pattern"),
        ("img_size", [8, 8, 8, 8, 8, 8, 8, 8, 8], "img_size"),
        ("depth", json.loads(nested(20)), "depth"),
        ("depth", json.loads(nested(200)), "nested deeper"),
    ],
)
def test_arguments_of_a_plan(name: str, value: object, sentence: str) -> None:
    plan = json.loads(Path("run/plan.json").read_text())
    Path("run/plan.json").write_text(json.dumps({**plan, "arch_args": {**plan["arch_args"], name: value}}))
    tensors = load_tensors(Path("run/model.safetensors"))
    save_file(tensors, "run/model.safetensors")  # without the hash of the plan
    for command in (("evaluate", "run", "--data", "digits"), ("export", "run")):
        assert sentence in expect_error(*command)


def test_the_allowed_arguments_build_models() -> None:
    for arch, args in {
        TINY: {"norm_layer": "layernorm", "img_size": [8, 16], "patch_size": 4, "init_values": 1e-5, "mlp_ratio": 2},
        "swin_tiny_patch4_window7_224": {"depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": [7, 7]},
        "pvt_v2_b0": {"sr_ratios": [8, 4, 2, 1], "pretrained_cfg_overlay": {"input_size": [1, 32, 32], "mean": [0.5]}},
        "eva02_tiny_patch14_224": {"depth": 1, "rope_type": "cat", "num_classes": 5},
        "beit_base_patch16_224": {"depth": 1, "use_rel_pos_bias": True},
        "resnet18": {"num_classes": 3, "in_chans": 1},
    }.items():
        assert create_on_meta(arch, args).num_classes > 0
    with pytest.raises(InputError, match="parameters, at most"):
        create_on_meta(TINY, {"embed_dim": 16384, "num_heads": 16, "depth": 256})


# ------------------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    "words",
    [
        "bench run/model.onnx --batch 99999999999999999999",
        "bench run/model.onnx --batch 9999999999",
        "bench run/model.onnx --runs 99999999999999999999",
        "bench run/model.onnx --warmup 99999999999999999999",
        "bench run/model.onnx --threads 99999999999999999999",
        "evaluate run/model.onnx --data digits --batch 99999999999999999999",
        "evaluate run/model.onnx --data digits --workers 99999999999999999999",
        f"evaluate run/model.onnx --data digits --batch {'9' * 5000}",
        f"bench run/model.onnx --batch {'9' * 5000}",
        f"export run --opset {'9' * 5000}",
        f"report {'9' * 5000}",
        f"export run --format trt --sm {'9' * 5000}",
        f"export run --format trt --workspace {'9' * 5000}G",
        "export run --batch 1:2:99999999999999999999",
        "study digits --dry-run --seeds 99999999999999999999",
        "study digits --dry-run --jobs 99999999999999999999",
        "bench timm:vit_tiny_patch16_224?depth=99999",
        "bench timm:vit_tiny_patch16_224?img_size=[[[[[[1]]]]]]",
    ],
    ids=lambda words: words[:60],
)
def test_arguments_out_of_any_range(words: str) -> None:
    assert len(expect_error(*words.split())) < 2 * LONGEST_LINE


def test_a_name_that_is_a_formula(tmp_path: Path) -> None:
    name = "$\\foo$"
    Path("run").rename(name)
    done = CliRunner().invoke(cli.main, ["report", name, "--pictures", "drawn", "--plot", "plot.png"])
    assert done.exit_code in (0, 2) and "unexpected" not in done.output


# ---------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("words", ["verify", "report", "evaluate", "recipe", "export"])
def test_control_characters_are_printed_as_text(words: str) -> None:
    name = NASTY.replace("\x00", "")
    done = CliRunner().invoke(cli.main, [words, name])
    assert done.exit_code == 2 and not {ord(c) for c in done.output} & ESCAPES.keys()
    assert "\\x1b" in done.output and "\\u202e" in done.output


def test_names_of_modules_and_classes() -> None:
    plan = json.loads(Path("run/plan.json").read_text())
    Path("run/plan.json").write_text(json.dumps({**plan, "removed": {NASTY: NASTY, "x" * 10**6: "drop"}}))
    done = CliRunner().invoke(cli.main, ["evaluate", "run", "--data", "digits"])
    assert done.exit_code == 2 and not {ord(c) for c in done.output} & ESCAPES.keys() and len(done.output) < 3000
    report = json.loads(Path("run/report.json").read_text())
    report["model"]["classes"] = [NASTY] * 10
    reported(report)
    done = CliRunner().invoke(cli.main, ["report", "run"])
    assert done.exit_code == 0 and not {ord(c) for c in done.output} & ESCAPES.keys()
    pages = Path("run/report.md").read_text() + Path("run/report.html").read_text()
    assert not {ord(c) for c in pages} & ESCAPES.keys() and "title" in pages


def test_errors_are_plain_text() -> None:
    error = InputError(f"{NASTY} {'x' * 10**6}\nnext line", hint=NASTY)
    assert len(error.message) < LONGEST_LINE + 30 and error.message.endswith("...\nnext line")
    assert error.hint == "a\\x1b]0;title\\x07\\x9b2J\\u202egnp\\x00" == str(InputError(NASTY))


def test_plain_data_has_limits() -> None:
    assert parse_plain(json.loads, nested(DEEPEST)) == json.loads(nested(DEEPEST))
    for text in (nested(DEEPEST + 1), nested(100_000), '{"a": 9223372036854775808}', "1" * 5000, "{"):
        with pytest.raises(ValueError):
            parse_plain(json.loads, text)
