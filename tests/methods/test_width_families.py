"""Every width method on every family: sliced equals masked, the result can be exported from plain data, or a reason."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import SAME, assert_moved, assert_same, build, contract, images, logits

from vitcompress import surgery
from vitcompress.errors import PlanError
from vitcompress.families import family_of
from vitcompress.methods import isomorphic, magnitude
from vitcompress.methods.budget import Ranking
from vitcompress.methods.options import Alignment
from vitcompress.methods.scores import random_scores
from vitcompress.methods.sero import method as sero
from vitcompress.methods.table import METHODS
from vitcompress.methods.upvit import method as upvit
from vitcompress.methods.width import Candidates, deploy, groups_of
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.models.cost import Cost, count_cost
from vitcompress.models.create import input_config
from vitcompress.plan import Plan
from vitcompress.verify.slice import slice_check

OPTIONS: dict[str, Any] = {
    "isomorphic": isomorphic.Options(align=Alignment(residual=4, ffn=4, head_dim=2)),
    "magnitude": magnitude.Options(),
    "sero": sero.Options(sparsity=0.4, round_to=2),
    "upvit": upvit.Options(target_args={"embed_dim": 8, "num_heads": 2}),
}
TARGETS = {"pvt": {"embed_dims": [8, 16], "depths": [1, 1]}, "swiglu": {"embed_dim": 8, "num_heads": 2}}
UNSUPPORTED = {
    ("upvit", "swin"): "each head has a relative position table or other parameters of its own",
    ("upvit", "eva"): "these embeddings rotate the channels of q and k by their position in the head",
}


@pytest.mark.parametrize(
    "variant",
    [
        *("plain", "distilled", "registers", "swiglu", "attention_pool", "dinov3", "rotary"),
        *("swin", "swin_padded", "pvt", "pvt_linear"),
    ],
)
@pytest.mark.parametrize("method", OPTIONS)
def test_every_family_is_pruned_or_rejected_with_a_reason(method: str, variant: str, tmp_path: Path) -> None:
    model, row = build(variant), contract(variant)
    family, base, options = family_of(model), Plan(row.arch, row.arch_args), OPTIONS[method]
    if method == "upvit" and variant.split("_")[0] in TARGETS:
        options = upvit.Options(target_args=TARGETS[variant.split("_")[0]])
    if reason := UNSUPPORTED.get((method, family.name)):
        with pytest.raises(PlanError, match=reason) as caught:
            METHODS[method].structure(model, family, base, options)
        assert caught.value.hint
        return
    delta = METHODS[method].structure(model, family, base, options)
    assert delta.kept
    x = images(variant)
    small = surgery.apply_to_copy(model, delta)
    assert_moved(logits(small, x), logits(model, x))
    assert sum(p.numel() for p in small.parameters()) < 0.9 * sum(p.numel() for p in model.parameters())
    check = slice_check(model, delta, x)
    assert (
        check.verdict == "passed"
        and check.value is not None
        and check.value <= SAME * float(logits(small, x).abs().max())
    )
    write_model(tmp_path / "small", small, base.then(delta))
    again = load_model(tmp_path / "small")
    assert_same(logits(again.double(), x), logits(small, x))


def test_relative_position_tables_follow_the_heads_and_merging_reads_four_times() -> None:
    model, row = build("swin"), contract("swin")
    base = Plan(row.arch, row.arch_args)
    delta = METHODS["isomorphic"].structure(model, family_of(model), base, OPTIONS["isomorphic"])
    small = surgery.apply_to_copy(model, delta)
    for path, count in delta.heads.items():
        whole, left = (m.get_parameter(f"{path}.relative_position_bias_table") for m in (model, small))
        assert left.shape[1] == count < whole.shape[1]
        channels = delta.kept[f"{path.removesuffix('.attn')}.qk"]
        width = row.arch_args["embed_dim"] * (1 if "layers.0" in path else 2) // whole.shape[1]
        assert torch.equal(left, whole[:, list(dict.fromkeys(c // width for c in channels))])
    assert delta.heads
    stream, size = delta.kept["layers.0.residual"], row.arch_args["embed_dim"]
    norm, reduction = "layers.1.downsample.norm.weight", "layers.1.downsample.reduction.weight"
    columns = [copy * size + channel for copy in range(4) for channel in stream]
    assert torch.equal(small.get_parameter(norm), model.get_parameter(norm)[columns])
    rows = list(delta.kept["layers.1.residual"])
    assert torch.equal(small.get_parameter(reduction), model.get_parameter(reduction)[rows][:, columns])


def test_q_and_k_under_a_rotary_embedding_keep_the_width_of_their_heads() -> None:
    model, row = build("rotary"), contract("rotary")
    family, base = family_of(model), Plan(row.arch, row.arch_args)
    fine = {"isomorphic": replace(OPTIONS["isomorphic"], align=Alignment(4, 4, 1)), "sero": OPTIONS["sero"]}
    for method, options in fine.items():
        delta = METHODS[method].structure(model, family, base, options)
        for path in (f"blocks.{number}" for number in range(2)):
            heads = delta.heads.get(f"{path}.attn", 4)
            qk, v = (len(delta.kept.get(f"{path}.{kind}", range(16))) for kind in ("qk", "v"))
            assert qk == heads * 4 > v, (method, path)


def test_tied_widths_are_rejected_under_a_rotary_embedding() -> None:
    model, row = build("rotary"), contract("rotary")
    with pytest.raises(PlanError, match="q and k lose channels with their heads only") as caught:
        sero.structure(model, family_of(model), Plan(row.arch, row.arch_args), replace(OPTIONS["sero"], layout="tied"))
    assert "padded" in (caught.value.hint or "")


@pytest.mark.parametrize("variant", ["plain", "layer_scale"])
def test_the_cost_of_a_step_after_upvit_is_that_of_the_deployed_model(variant: str) -> None:
    """Nothing is folded in a model of timm, but in what a later step makes of it."""
    dense, row = build(variant, depth=3), contract(variant, depth=3)
    start = Plan(row.arch, row.arch_args)
    base = start.then(METHODS["upvit"].structure(dense, family_of(dense), start, OPTIONS["upvit"]))
    model = surgery.apply_to_copy(dense, base)
    spaces, size = family_of(model).spaces(model), input_config(model).size

    def deployed(delta: Plan) -> Cost:
        result = surgery.apply_to_copy(model, delta)
        surgery.fold_linears(result, base.then(delta))
        return count_cost(result, size)

    removal = base.delta(removed={"blocks.1.mlp.act": "identity"})
    assert base.standard and deployed(removal).macs < count_cost(model, size).macs
    assert count_cost(deploy(model, base, removal), size) == deployed(removal)
    candidates = Candidates(model, spaces, groups_of(spaces, random_scores(spaces, 0), "isomorphic"), base)
    counts = {group.name: max(1, group.size // 2) for group in candidates.groups}
    assert candidates.cost(counts) == deployed(candidates.delta(counts))


def test_a_layer_without_effect_ranks_last() -> None:
    spaces = family_of(model := build("plain")).spaces(model)
    scores = random_scores(spaces, 0)
    dead = {
        name: torch.zeros_like(values) for name, values in scores.items() if name in ("blocks.0.mlp", "blocks.1.qk")
    }
    groups = {group.name: group for group in groups_of(spaces, {**scores, **dead}, "isomorphic")}
    counts = Ranking(tuple(groups.values()), {group.scope: 0.5 for group in groups.values()}).counts()
    assert counts["blocks.0.mlp"] == 1 < counts["blocks.1.mlp"]
    alone = scores["blocks.1.v"].view(4, -1).mean(0).argsort(descending=True).tolist()  # v decides where q and k are 0
    assert groups["blocks.1.attn.head_dim"].order == alone
    with pytest.raises(PlanError, match="all scores are 0"):
        groups_of(spaces, {name: torch.zeros_like(values) for name, values in scores.items()}, "isomorphic")
