"""UP-ViT: scores are those of truly deleted channels, and the result is a standard model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from contracts import assert_moved, assert_same, build, contract, logits
from contracts import images as pictures
from method_world import context, model
from safetensors import safe_open
from safetensors.torch import load_file

import vitcompress as vc
from vitcompress import surgery
from vitcompress.errors import InputError, PlanError
from vitcompress.families import Space, family_of
from vitcompress.io.files import write_json
from vitcompress.methods.table import METHODS
from vitcompress.methods.upvit import method as upvit
from vitcompress.methods.upvit.importance import Component
from vitcompress.methods.upvit.ranking import best, candidates, least_first
from vitcompress.methods.upvit.target import Target, standard_blocks
from vitcompress.models.checkpoint import load_model, save_model
from vitcompress.models.create import create_model, current_plan, input_config, plan_of
from vitcompress.models.standard import standard_model
from vitcompress.models.weights import open_weights
from vitcompress.pipeline.api import prune
from vitcompress.plan import Plan
from vitcompress.verify.slice import slice_check

SMALL: dict[str, Any] = {"embed_dim": 8, "num_heads": 1, "depth": 3}


# ---------------------------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize(
    ("strategy", "kept", "of_skewed"),
    [
        ("groups", (1, 2, 6, 7), (0, 1, 6, 7)),
        ("across", (1, 2, 6, 7), (0, 1, 2, 3)),
        ("each", (1, 2, 5, 6), (0, 2, 5, 7)),
    ],
)
def test_regrouping_strategies(strategy: Any, kept: tuple[int, ...], of_skewed: tuple[int, ...]) -> None:
    """Four heads of two channels to two heads of two."""
    order = least_first([0.1, 0.9, 0.8, 0.2, 0.3, 0.4, 0.7, 0.6])
    assert order == [0, 3, 4, 5, 7, 6, 2, 1]
    skewed = least_first([0.9, 0.8, 0.7, 0.6, 0.1, 0.2, 0.3, 0.4])
    space = Space("blocks.0.qk", "qk", 8, (), heads=4, attention="blocks.0.attn")
    attention = Component("blocks.0.attn", "attention", (space,))
    parts = Target("vit", {}, {}, {}, {"blocks.0.attn": (4, 2)}, strategy).parts(attention)
    assert (best(order, 4, parts), best(skewed, 4, parts)) == (kept, of_skewed)


def test_published_shape_of_deit_b_to_t() -> None:
    """12 heads of 64 to 3 of 64: each new head keeps 64 of 4 old heads' 256."""
    order = least_first(np.random.default_rng(0).random(768).tolist())
    kept = best(order, 192, 3)
    assert [sum(256 * g <= c < 256 * (g + 1) for c in kept[64 * g : 64 * (g + 1)]) for g in range(3)] == [64] * 3


# --------------------------------------------------------------------------------------------------------------- blocks


def test_block_candidates() -> None:
    dense = model(depth=4)
    ways = list(candidates("blocks", standard_blocks(dense, family_of(dense))["blocks"]))
    assert len(ways) == 2 * 4 - 1
    assert sum(way.title.startswith("hybrid") for way in ways) == 3
    first = ways[3]  # FFN of 1, attention of 2
    assert [" + ".join(block.parts) for block in first.remaining] == [
        "blocks.0",
        "blocks.1.attn + blocks.2.mlp",
        "blocks.3",
    ]
    ways = list(candidates("blocks", first.remaining))
    assert len(ways) == 5
    second = ways[2]  # the hybrid block
    assert [block.parts for block in second.remaining] == [("blocks.0",), ("blocks.3",)]
    base = Plan("vit_tiny_patch16_224")
    small = surgery.apply_to_copy(dense, base.delta(removed=dict.fromkeys([*first.removed, *second.removed], "drop")))
    assert list(family_of(small).blocks(small)) == ["blocks.0", "blocks.3"]
    assert list(candidates("blocks", second.remaining[:1])) == []


def test_every_candidate_loads_into_the_shallower_model() -> None:
    dense, x = build("layer_scale", depth=3), pictures("layer_scale")
    row = contract("layer_scale", depth=3)
    goal = {"arch": row.arch, "args": {**row.arch_args, "depth": 2}}
    for way in candidates("blocks", standard_blocks(dense, family_of(dense))["blocks"]):
        plan = row.plan.delta(removed=dict.fromkeys(way.removed, "drop"), standard=goal)
        small = surgery.apply_to_copy(dense, plan)
        assert_same(logits(standard_model(small, plan), x), logits(small, x))
        assert_moved(logits(small, x), logits(dense, x))


# ----------------------------------------------------------------------------------------------------------------- plan


def test_measurements_are_reported_in_forward_order(tmp_path: Path) -> None:
    for number in (0, 2, 10):
        write_json(tmp_path / f"scores-blocks.{number}.mlp.json", [1.0, 2.0])
        write_json(tmp_path / f"blocks-{number}.json", {"ways": [f"block blocks.{number}"], "scores": [1.0]})
    rounds, channels = upvit.report(tmp_path).tables
    assert [row[0] for row in channels.rows] == ["blocks.0.mlp", "blocks.2.mlp", "blocks.10.mlp"]
    assert [row[1].split(" (")[0] for row in rounds.rows] == [f"block blocks.{n}" for n in (0, 2, 10)]


def test_an_attention_pool_is_reported_as_the_attentions_of_blocks_are(tmp_path: Path) -> None:
    write_json(tmp_path / "kept.json", {"blocks.0.qk": [1], "blocks.0.v": [1], "attn_pool.qk": [1], "attn_pool.v": [1]})
    for name in ("blocks.0.attn", "attn_pool"):
        write_json(tmp_path / f"scores-{name}.json", [1.0, 3.0])
    report = upvit.report(tmp_path)
    assert {row[0]: row[2:] for row in report.tables[0].rows} == dict.fromkeys(
        ("blocks.0.attn", "attn_pool"), ("1", "4", "75.0 %")
    )
    (chart,) = report.charts
    assert "attention" in chart.title and len(chart.lines) == 2


def test_the_result_is_a_standard_timm_model(tmp_path: Path) -> None:
    dense = model(depth=4)
    options = upvit.Options(target_args=SMALL, images=24)
    plan = upvit.plan(dense, context(tmp_path, dense), options)
    small = surgery.apply_to_copy(dense, plan)
    standard = standard_model(small, plan)
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert (standard(x) - small(x)).abs().max() < 1e-5  # float32, and heads whose scale went into q
    plain = timm.create_model(plan.standard["arch"], **plan.standard["args"])
    plain.load_state_dict(standard.state_dict(), strict=True)
    assert plain.embed_dim == 8 and len(plain.blocks) == 3 and plain.blocks[0].attn.num_heads == 1
    assert (small(x) - dense(x)).abs().max() > 1e-3


def test_the_standard_model_has_another_classifier(tmp_path: Path) -> None:
    dense = model(depth=4)
    plan = upvit.plan(dense, context(tmp_path / "plan", dense), upvit.Options(target_args=SMALL, images=24))
    small: Any = prune(dense, plan)
    small.reset_classifier(7)
    save_model(small, tmp_path / "saved", classes=list("abcdefg"))
    loaded: Any = load_model(tmp_path / "saved")
    with safe_open(tmp_path / "saved/standard.safetensors", "pt") as file:
        args = json.loads(file.metadata()["args"])["model_args"]
        assert args["pretrained_cfg_overlay"]["label_names"] == list("abcdefg")
    loaded.reset_classifier(2)
    assert "pretrained_cfg_overlay" not in current_plan(loaded).standard["args"]
    loaded = load_model(tmp_path / "saved")
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(x), small(x)) and loaded.plan.standard["args"]["num_classes"] == 7
    assert (standard_model(loaded, loaded.plan)(x) - small(x)).abs().max() < 1e-5  # float32, as above


def test_the_target_has_the_current_classes_and_size_of_the_model() -> None:
    dense: Any = model(depth=4)
    dense.reset_classifier(7)
    dense.set_input_size((8, 16))
    options = upvit.Options(target_args={"embed_dim": 8, "num_heads": 1})
    small = prune(dense, upvit.structure(dense, family_of(dense), plan_of(dense), options))
    assert small.plan.standard["args"]["num_classes"] == 7 and small.plan.standard["args"]["img_size"] == [8, 16]
    assert standard_model(small, small.plan)(torch.zeros(1, 1, 8, 16)).shape == (1, 7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_standard_model_is_checked_in_its_own_type(dtype: torch.dtype, tmp_path: Path) -> None:
    dense = model(depth=4).to(dtype)
    narrow = upvit.Options(target_args=SMALL)
    save_model(prune(dense, upvit.structure(dense, family_of(dense), plan_of(dense), narrow)), tmp_path / "saved")
    checks = {check.name: check for check in vc.verify(tmp_path / "saved").checks}
    assert checks["standard"].verdict == "passed" and "failed" not in {check.verdict for check in checks.values()}
    assert {tensor.dtype for tensor in load_file(tmp_path / "saved/standard.safetensors").values()} == {dtype}


def test_equal_models_are_equal_files(tmp_path: Path) -> None:
    """safetensors orders several entries of metadata at random, so that equal runs had different hashes."""
    dense, narrow = model(depth=4), upvit.Options(target_args=SMALL)
    small = prune(dense, upvit.structure(dense, family_of(dense), plan_of(dense), narrow))
    for number in range(8):
        save_model(small, tmp_path / str(number))
    files = [tmp_path / str(number) / "standard.safetensors" for number in range(8)]
    assert len({file.read_bytes() for file in files}) == 1
    opened = open_weights(files[0])
    assert (opened.stated["model"], opened.stated["num_heads"]) == (small.plan.standard["arch"], 1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"act_layer": "relu", "pretrained_cfg_overlay": {"mean": [0.1], "crop_pct": 1.0}},
        {"pos_embed": "none"},
        {"pre_norm": True},
        {"proj_bias": False},
        {"final_norm": False},
    ],
)
def test_the_standard_file_states_all_arguments(arguments: Any, tmp_path: Path) -> None:
    """Its weights do not show all of them: with others, they fit but compute something else."""
    dense = model(num_classes=5, **arguments)
    narrow = upvit.Options(target_args={"embed_dim": 8, "num_heads": 1})
    small: Any = prune(dense, upvit.structure(dense, family_of(dense), plan_of(dense), narrow))
    save_model(small, tmp_path / "saved", classes=list("abcde"))
    read: Any = vc.create_model("vit_tiny_patch16_224", weights=tmp_path / "saved/standard.safetensors")
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert (read(x) - small(x)).abs().max() < 1e-5  # float32, as above
    assert read.pretrained_cfg["label_names"] == list("abcde")
    for name in ("mean", "crop_pct"):
        assert read.pretrained_cfg[name] == small.pretrained_cfg[name]


@pytest.mark.parametrize("create", [vc.create_model, timm.create_model])
def test_the_sizes_of_the_dense_model_may_be_tuples(create: Any, tmp_path: Path) -> None:
    """timm records them as they are, a plan as lists: that is no change of the model since."""
    sizes: dict[str, Any] = {"embed_dims": (16, 16), "depths": (1, 1), "num_heads": (1, 2), "sr_ratios": (2, 1)}
    dense = create("pvt_v2_b0", **sizes, mlp_ratios=(2, 2), num_classes=3)
    narrow = upvit.Options(target_args={"embed_dims": (8, 8)})
    small = prune(dense, upvit.structure(dense, family_of(dense), plan_of(dense), narrow))
    save_model(small, tmp_path / "saved")
    plan, x = load_model(tmp_path / "saved").plan, torch.rand(2, 3, 64, 64)
    plain = timm.create_model("pvt_v2_b0", **plan.standard["args"])
    plain.load_state_dict(load_file(tmp_path / "saved/standard.safetensors"))
    assert plan == small.plan and (plain.eval()(x) - small.eval()(x)).abs().max() < 1e-5  # float32, as above


@pytest.mark.parametrize("score", ["exact", "fisher", "screened"])
def test_plan_and_structure_have_the_same_sizes(score: Any, tmp_path: Path) -> None:
    dense = model(depth=4)
    options = upvit.Options(target_args=SMALL, images=24, score=score)
    plan = upvit.plan(dense, context(tmp_path, dense), options)
    assert upvit.plan(dense, context(tmp_path, dense), options) == plan  # from what was kept
    arbitrary = upvit.structure(dense, family_of(dense), context(tmp_path, dense).plan, options)
    assert plan.standard == arbitrary.standard
    shapes = [
        sorted(t.shape for t in standard_model(surgery.apply_to_copy(dense, p), p).parameters())
        for p in (plan, arbitrary)
    ]
    assert shapes[0] == shapes[1]
    titles = [table.title for table in upvit.report(tmp_path).tables]
    assert any("blocks" in title for title in titles)
    blocks, *channels = upvit.report(tmp_path).charts
    assert len(blocks.lines) == 1 and len(blocks.lines[0].x) == 7  # 2 L - 1 ways
    kinds = {chart.title.split(" ")[1]: chart.lines for chart in channels}
    assert set(kinds) == {"attention", "FFN", "residual"} and len(kinds["FFN"]) == 3
    assert [sum(not out for out in line.gone) for line in kinds["residual"]] == [8]
    assert json.loads((tmp_path / "kept.json").read_text())["residual"] == list(plan.kept["residual"])


def test_screens_measure_only_around_the_cut(tmp_path: Path) -> None:
    dense = model()
    options = upvit.Options(target_args={"embed_dim": 8}, images=24)
    by = replace(options, score="screened", band=0.25)
    for screen in ("fisher", "images"):
        folder = tmp_path / screen
        few = {"screen_images": 12} if screen == "images" else {}
        upvit.plan(dense, context(folder, dense), replace(by, screen=screen, **few))
        measured = json.loads((folder / "scores-blocks.0.mlp.json").read_text())
        assert len(measured) == 64 and sum(score > 0 for score in measured) <= 16
    all_measured, exact, fisher = (
        upvit.plan(dense, context(tmp_path / name, dense), own)
        for name, own in {
            "all": replace(by, band=1.0),
            "exact": options,
            "rough": replace(options, score="fisher"),
        }.items()
    )
    assert all_measured == exact != fisher


def test_a_cut_near_the_end_is_measured_as_widely(tmp_path: Path) -> None:
    dense, options = model(), upvit.Options(target_args={"mlp_ratio": 3.5}, images=24, score="screened", band=0.5)
    upvit.plan(dense, context(tmp_path, dense), options)
    measured = json.loads((tmp_path / "scores-blocks.0.mlp.json").read_text())
    assert len(measured) == 64 and sum(score > 0 for score in measured) == 32


@pytest.mark.parametrize("method", ["upvit", "nose", "te_static"])
def test_a_model_whose_outputs_never_change_is_not_ranked(method: str) -> None:
    dense = model()
    torch.nn.init.zeros_(dense.get_submodule("head").weight)
    data = [(torch.randn(9, *input_config(dense).size), torch.arange(9) % 3)]
    sizes: Any = {"target_args": {"embed_dim": 8}, "images": 9} if method == "upvit" else {"pruned_layers": 2}
    with pytest.raises(PlanError, match="cannot be ranked: all scores are 0"):
        vc.plan(dense, method, data, **sizes)


def test_a_second_step_starts_from_the_sizes_of_the_first() -> None:
    vit, x = model(), [(torch.randn(3, *input_config(model()).size), torch.arange(3))]
    small = prune(vit, vc.plan(vit, "upvit", x, target_args={"mlp_ratio": 2.0, "depth": 2}, images=3))
    plan = vc.plan(small, "upvit", target_args={"embed_dim": 8}, score="magnitude")
    assert {"mlp_ratio": 2.0, "depth": 2, "embed_dim": 8}.items() <= plan.standard["args"].items()
    smaller = prune(small, plan)
    assert {space.size for space in family_of(smaller).spaces(smaller) if space.kind == "mlp"} == {16}


@pytest.mark.parametrize("screen", ["fisher", "images"])
def test_screened_report_estimates_the_channels_that_were_not_measured(screen: Any, tmp_path: Path) -> None:
    """The share of importance that is kept agrees with that of exact scores, where it was up to 19 points too low."""
    dense = model()
    options = upvit.Options(target_args={"embed_dim": 8}, images=24)
    upvit.plan(dense, context(tmp_path / "exact", dense), options)
    screened = replace(options, score="screened", screen=screen, band=0.25)
    if screen == "images":
        screened = replace(screened, screen_images=12)
    upvit.plan(dense, context(tmp_path / "screened", dense), screened)
    exact, estimated = (
        [float(row[4].split()[0]) for row in upvit.report(tmp_path / name).tables[0].rows]
        for name in ("exact", "screened")
    )
    assert estimated == pytest.approx(exact, abs=4)


def test_the_least_important_channels_go(tmp_path: Path) -> None:
    """Channels that are dense useless by hand are those that are cut."""
    dense = model()
    useless = [1, 4, 5, 9, 14, 15, 20, 33]
    with torch.no_grad():
        dense.get_parameter("blocks.1.mlp.fc2.weight")[:, useless] = 0.0
    options = upvit.Options(target_args={"mlp_ratio": 3.5}, images=24)
    plan = upvit.plan(dense, context(tmp_path, dense), options)
    assert set(range(64)) - set(plan.kept["blocks.1.mlp"]) == set(useless)
    assert set(plan.kept) == {f"blocks.{n}.mlp" for n in range(3)}


def test_too_few_proxy_images_are_reported(tmp_path: Path) -> None:
    from vitcompress.io.progress import Progress

    class Notes(Progress):
        notes: list[str] = []  # noqa: RUF012 (one test)

        def note(self, text: str) -> None:
            self.notes.append(text)

    dense = model()
    upvit.plan(
        dense, context(tmp_path, dense, progress=Notes()), upvit.Options(target_args={"mlp_ratio": 2.0}, images=6)
    )
    assert any("6 proxy images are too few" in text and "73.65 %" in text for text in Notes.notes)
    (remark,) = METHODS["upvit"].report(tmp_path).remarks
    assert remark in Notes.notes and METHODS["upvit"].report(tmp_path / "nowhere").remarks == []
    Notes.notes.clear()
    unmeasured = upvit.Options(target_args={"mlp_ratio": 2.0}, score="magnitude")
    upvit.plan(dense, context(tmp_path / "magnitude", dense, progress=Notes()), unmeasured)
    assert (
        not any("too few" in text for text in Notes.notes)
        and METHODS["upvit"].report(tmp_path / "magnitude").remarks == []
    )


def test_scores_of_weights_need_no_images() -> None:
    """`vc.plan(model, "upvit", score="magnitude", ...)` without data was rejected for images that it does not read."""
    dense = model()
    sizes = {"target_args": {"mlp_ratio": 2.0}}
    assert vc.plan(dense, "upvit", score="magnitude", **sizes).kept
    with pytest.raises(InputError, match="needs images"):
        vc.plan(dense, "upvit", score="exact", **sizes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no target is set"),
        ({"target_args": {"num_heads": 2}}, "as large as the model"),
        ({"target_args": {"embed_dim": 32}}, "32 stream channels"),
        ({"target_args": {"depth": 4, "embed_dim": 8}}, "4 blocks in blocks, the model 3"),
        ({"target_args": {"patch_size": 2, "embed_dim": 8}}, "other images, patches, tokens or classes"),
        ({"target_args": {"num_classes": 7, "embed_dim": 8}}, "other images, patches, tokens or classes"),
        ({"target": "pvt_v2_b0", "target_args": {}}, "cannot build|other images"),
        ({"target_args": {"embed_dim": 12, "num_heads": 4}}, "4 heads in blocks, the model 2"),
        ({"target_args": {"embed_dim": 9}}, "timm cannot build"),
    ],
)
def test_targets_that_cannot_be_reached(options: Any, message: str, tmp_path: Path) -> None:
    dense = model()
    with pytest.raises(Exception, match=message) as caught:
        upvit.structure(dense, family_of(dense), context(tmp_path, dense).plan, upvit.Options(**options))
    assert caught.value.exit_code == 2 and "model.args" not in caught.value.hint  # type: ignore[attr-defined]


def test_a_target_of_another_name_states_the_arguments_that_it_takes_from_the_model(tmp_path: Path) -> None:
    dense = model()
    options = upvit.Options(target="vit_small_patch16_224", target_args={"depth": 3})
    with pytest.raises(PlanError, match="as large as the model") as caught:
        upvit.structure(dense, family_of(dense), context(tmp_path, dense).plan, options)
    assert caught.value.hint and "of the model itself are embed_dim, img_size, in_chans, num_" in caught.value.hint


def test_a_target_of_another_kind_is_named_as_the_target() -> None:
    """Not as the model, which is supported."""
    with torch.device("meta"):
        dense = timm.create_model("deit_tiny_patch16_224").eval()
    options = upvit.Options(target="resnet18")
    with pytest.raises(PlanError, match=r"the target resnet18 cannot be used: .* of type ResNet") as caught:
        upvit.structure(dense, family_of(dense), Plan("deit_tiny_patch16_224"), options)
    assert caught.value.hint == "set other sizes in target_args, or another target"


def test_swin_is_rejected_with_its_reason() -> None:
    with torch.device("meta"):
        dense = timm.create_model("swin_small_patch4_window7_224")
    base, options = Plan("swin_small_patch4_window7_224"), upvit.Options(target="swin_tiny_patch4_window7_224")
    with pytest.raises(PlanError, match="does not support swin models: each head has a relative position table"):
        upvit.structure(dense, family_of(dense), base, options)


@pytest.mark.parametrize("variant", ["beit_absolute", "packed_biases"])
def test_models_with_other_names_than_those_of_timm_are_rejected(variant: str) -> None:
    """The result would be no checkpoint of timm's model."""
    row = contract(variant, **({"use_rot_pos_emb": False} if variant == "packed_biases" else {}))
    dense = create_model(row.arch, row.arch_args)
    with pytest.raises(PlanError, match="whose weights have other names in timm"):
        upvit.structure(dense, family_of(dense), row.plan, upvit.Options(target_args={"embed_dim": 8, "num_heads": 1}))


@pytest.mark.parametrize(
    ("edits", "part"),
    [
        ({"removed": {"blocks.1.mlp.act": "identity"}}, "blocks.1.mlp.act"),
        ({"appended": {"blocks.2": "gelu"}}, "blocks.2"),
    ],
)
def test_blocks_of_another_function_make_no_standard_model(edits: Any, part: str) -> None:
    """timm's blocks have an activation in the FFN and none at the end; nothing is trained before this is known."""
    row = contract("plain", depth=3)
    base = replace(row.plan, **edits)
    pruned = surgery.apply_to_copy(build("plain", depth=3), base)
    with pytest.raises(PlanError, match=f"{part} .* standard"):
        upvit.structure(pruned, family_of(pruned), base, upvit.Options(target_args={"depth": 2}))
    narrow = upvit.structure(pruned, family_of(pruned), base, upvit.Options(target_args={"embed_dim": 8}))
    assert narrow.kept and not narrow.standard  # only widths change, and no standard model is claimed


@pytest.mark.parametrize("activations", [(), (1,)])
def test_folded_layers_make_no_standard_model(activations: tuple[int, ...]) -> None:
    """The error was that the model takes other images, patches, tokens or classes than itself."""
    row, options = contract("layer_scale", depth=3), upvit.Options(target_args={"embed_dim": 8, "num_heads": 1})
    pruned: Any = vc.create_model(row.arch, **row.arch_args)
    if activations:
        pruned = prune(pruned, vc.plan(pruned, "fixed", activation=activations))
    folded: Any = vc.fold(pruned)
    with pytest.raises(PlanError, match=r"\.(ls1|mlp) is folded") as caught:
        upvit.structure(folded, family_of(folded), folded.plan, options)
    assert caught.value.hint == "use upvit before folding"
    assert upvit.structure(pruned, family_of(pruned), pruned.plan, options).kept


def test_a_replaced_branch_makes_no_standard_model() -> None:
    """Without its FFN and with x + norm(x) for its attention, a block is still not a removed one."""
    row = contract("swiglu", depth=3)
    base = replace(row.plan, removed={"blocks.1.attn": "norm_identity", "blocks.1.mlp": "drop"})
    pruned = surgery.apply_to_copy(build("swiglu", depth=3), base)
    with pytest.raises(PlanError, match=r"blocks\.1\.attn .* standard"):
        upvit.structure(pruned, family_of(pruned), base, upvit.Options(target_args={"depth": 1}))


def test_heads_that_do_not_divide() -> None:
    dense = model(width=24, num_heads=3)
    args = {**context(Path(), dense).plan.arch_args, "embed_dim": 24, "num_heads": 3}
    base = Plan("vit_tiny_patch16_224", args)
    with pytest.raises(PlanError, match="3 heads cannot become 2"):
        upvit.structure(dense, family_of(dense), base, upvit.Options(target_args={"embed_dim": 16, "num_heads": 2}))
    with pytest.raises(PlanError, match="16 of 24 attention channels do not form 3"):
        options = upvit.Options(target_args={"embed_dim": 16, "num_heads": 1}, heads="each")
        upvit.structure(dense, family_of(dense), base, options)


@pytest.mark.parametrize(
    ("arch", "goal", "args", "params"),
    [
        ("deit_base_patch16_224", "deit_small_patch16_224", {}, 22050664),
        ("deit_base_patch16_224", "deit_tiny_patch16_224", {}, 5717416),
        ("deit_base_patch16_224", "deit_tiny_patch16_224", {"depth": 10}, 4827688),
        ("pvt_v2_b2", "pvt_v2_b1", {}, 14009000),
        ("pvt_v2_b2", "pvt_v2_b0", {}, 3666760),
    ],
)
def test_published_targets(arch: str, goal: str, args: Any, params: int) -> None:
    """Table D2 and D4: 22.1, 5.7, 4.8, 14.01 and 3.67 M; to the parameter."""
    with torch.device("meta"):
        dense = timm.create_model(arch).eval()
    plan = upvit.structure(dense, family_of(dense), Plan(arch), upvit.Options(target=goal, target_args=args))
    assert sum(p.numel() for p in surgery.apply_plan(dense, plan).parameters()) == params
    assert plan.standard["arch"] == goal


def test_all_spaces_except_regrouped_heads_are_compared_with_masks() -> None:
    dense, x = build("plain"), pictures("plain")
    base = contract("plain").plan
    plan = upvit.structure(
        dense, family_of(dense), base, upvit.Options(target_args={"embed_dim": 8, "num_heads": 2, "mlp_ratio": 2.0})
    )
    mixed = (0, 1, 4, 5, 8, 9, 12, 13)  # two channels of each of the four heads, in two new ones
    attention = {f"blocks.{n}.{part}": mixed for n in range(2) for part in ("qk", "v")}
    check = slice_check(dense, replace(plan, kept={**plan.kept, **attention}), x)
    assert check.verdict == "passed" and "the heads of blocks.0.attn, blocks.1.attn are regrouped" in check.detail


# ------------------------------------------------------------------------------------------------------------- dry runs


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [("block", 1), ("channel", 1)]),
        ({"target_args": {"depth": 2}}, [("block", 2)]),
        ({"target_args": {"embed_dim": 8, "num_heads": 1}}, [("channel", 1)]),
        ({"score": "random"}, [("block", 1)]),
        ({"score": "screened"}, [("block", 1), ("fisher", 1), ("channel", 1)]),
    ],
)
def test_a_dry_run_lists_the_measurements_of_blocks_and_of_channels(
    options: dict[str, Any], expected: list[tuple[str, int]]
) -> None:
    """Also if there are no channels to delete, or no blocks to remove."""
    dense = model(depth=4)
    own = upvit.Options(**{"target_args": SMALL, "images": 6, **options})
    rows = upvit.UPVIT.estimate(dense, family_of(dense), own)
    assert [(word in row.title, row.rounds) for row, (word, _) in zip(rows, expected, strict=True)] == [
        (True, rounds) for _, rounds in expected
    ]
    assert {row.images for row in rows} == {6}
