"""Impossible widths: one sentence with the request and what is allowed, and nothing is written."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from command_line import RECIPE, begin, expect_error

from vitcompress import cli
from vitcompress.pipeline.latency import LatencyClock

STEP = 'method = "random"\npruned_layers = 2'
MODEL = RECIPE[RECIPE.index("name = ") : RECIPE.index("weights = ")]
ISOMORPHIC = 'method = "isomorphic"\nalign = { residual = 8, ffn = 8, head_dim = 4 }'
SWIN = """name = "swin_tiny_patch4_window7_224"
args = { img_size = 16, patch_size = 2, embed_dim = 16, depths = [2, 2], num_heads = [2, 4], window_size = 4 }
"""
PVT = """name = "pvt_v2_b0"
args = { embed_dims = [16, 32], depths = [1, 1], num_heads = [1, 2], sr_ratios = [2, 1], mlp_ratios = [2, 2] }
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path / "home", monkeypatch)
    monkeypatch.setattr(LatencyClock, "wait_until_quiet", lambda self: "")  # other tests keep the machine busy


def recipe(step: str, model: str = MODEL) -> str:
    assert STEP in RECIPE
    Path("width.toml").write_text(RECIPE.replace(STEP, step).replace(MODEL, model))
    return "width.toml"


@pytest.mark.parametrize("mode", ["--structure-only", "--device=cpu"])  # also before the first training
@pytest.mark.parametrize(
    ("step", "words"),
    [
        ('method = "sero"\nsparsity = 0.99\nround_to = 2', ["sparsity is 0.99", "at most 0.", "layout = 'ragged'"]),
        ('method = "sero"\nsparsity = 0.9999\nlayout = "ragged"', ["sparsity is 0.9999", "all 288 units", "lower"]),
        ('method = "sero"\nsparsity = 0.5\nround_to = 64', ["round_to is 64", "8 channels", "8 or less"]),
        ('method = "sero"\nsparsity = 0.5\nepochs = 1', ["warmup_epochs is 1 of 1", "raise epochs"]),
        (f'{ISOMORPHIC}\ntarget = "macs"\namount = 1e-6', ["1e-06 G MACs cannot be reached", "allows", " to "]),
        (f'{ISOMORPHIC}\ntarget = "params"\namount = 9.0', ["9 M parameters cannot be reached", "allows"]),
        (
            f'{ISOMORPHIC}\ntarget = "latency"\namount = 1e-6\nlatency_on = "torch"',
            ["1e-06 ms on torch cannot be reached", "allows"],
        ),
        ('method = "isomorphic"\ntarget = "macs"', ["amount", "G MACs"]),
        ('method = "isomorphic"', ["multiples of 64", "has only 16", "16 or less"]),
        ('method = "upvit"\ntarget_args = { num_heads = 3 }', ["embed_dim", "timm"]),
        ('method = "upvit"\ntarget_args = { embed_dim = 32 }', ["not a smaller version", "32 stream channels"]),
        ('method = "upvit"\ntarget_args = { depth = 3 }', ["as large as the model"]),
        ('method = "upvit"', ["no target is set", "target_args"]),
    ],
)
def test_impossible_widths_are_rejected(step: str, words: list[str], mode: str) -> None:
    message = expect_error("recipe", recipe(step), mode)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("step", "model", "words"),
    [
        ('method = "hetdpt"\npruned_layers = 2', PVT, ["depth-wise 3x3 convolution", "cannot be folded exactly"]),
        (
            'method = "hetdpt"\npruned_layers = 2',
            MODEL.replace(" }", ", scale_mlp_norm = true }"),
            ["normalize their hidden"],
        ),
        ('method = "upvit"\ntarget_args = { embed_dim = 8 }', SWIN, ["does not support swin models", "position table"]),
        (
            'method = "upvit"\ntarget_args = { embed_dim = 16, num_heads = 2 }',
            MODEL.replace("embed_dim = 16", "embed_dim = 24").replace("num_heads = 2", "num_heads = 3"),
            ["3 heads cannot become 2", "divides 3"],
        ),
    ],
    ids=["hetdpt on pvt", "hetdpt with norms in FFNs", "upvit on swin", "three heads to two"],
)
def test_what_a_family_does_not_allow(step: str, model: str, words: list[str]) -> None:
    message = expect_error("recipe", recipe(step, model), "--structure-only")
    assert all(word in message for word in words), message


def test_a_run_whose_recipe_changed_is_not_continued() -> None:
    words = ["recipe", recipe(ISOMORPHIC), "--structure-only", "--out", "run", "--set", "export.formats=[]"]
    assert CliRunner().invoke(cli.main, words).exit_code == 0
    message = expect_error(*words, "--set", "step.0.keep_ratio=0.75")
    assert "keep_ratio is 0.5 there, 0.75 here" in message and "--fresh" in message
