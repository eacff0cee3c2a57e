"""Counted parameters and multiply-accumulates are the exact integers of the closed form, in both conventions."""

import itertools
from dataclasses import replace

import pytest
import timm
import torch
from contracts import Contract, build, contract, every_variant
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_plans import depth_plan
from torch import nn
from torch.nn.utils.prune import l1_unstructured

from vitcompress.errors import UnsupportedModelError
from vitcompress.models.cost import Cost, count_cost
from vitcompress.plan import Plan
from vitcompress.surgery import apply_plan, apply_to_copy, fold_linears

IMAGENET = (3, 224, 224)
B, S, T = "deit_base_distilled_patch16_224", "deit_small_distilled_patch16_224", "deit_tiny_distilled_patch16_224"
LAYERS = {  # HetDPT: attentions and activations removed
    "B-8": ([0, 3, 7, 11], [2, 7, 8, 11]),
    "B-10": ([0, 3, 7, 8, 11], [2, 7, 8, 10, 11]),
    "S-6": ([1, 10, 11], [8, 10, 11]),
    "S-8": ([1, 7, 10, 11], [7, 8, 10, 11]),
}


def meta(arch: str, **args: object) -> nn.Module:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return timm.create_model(arch, **args).eval()


@pytest.fixture(scope="module")
def dense() -> dict[str, nn.Module]:
    plain = [B.replace("_distilled", ""), S.replace("_distilled", "")]
    return {arch: meta(arch) for arch in (B, S, T, *plain)}


def pruned(model: nn.Module, arch: str, attentions: list, activations: list, bypass: str, *, folded: bool) -> nn.Module:
    plan = depth_plan(model, Plan(arch), attentions, activations, attention_bypass=bypass)
    small = apply_to_copy(model, plan)
    if folded:
        fold_linears(small, plan)
    return small


@pytest.mark.parametrize(
    ("arch", "cost"),
    [
        (B, Cost(87338192, 17656811520, 16934203392)),
        (S, Cost(22436432, 4624140288, 4262836224)),
        (T, Cost(5910800, 1261003776, 1080351744)),
        ("deit_base_patch16_224", Cost(86567656, 17563828224, 16848500736)),
        ("deit_small_patch16_224", Cost(22050664, 4598882304, 4241218560)),
    ],
)
def test_dense_models(dense: dict[str, nn.Module], arch: str, cost: Cost) -> None:
    assert count_cost(dense[arch], IMAGENET) == cost


@pytest.mark.parametrize(
    ("arch", "layers", "cost"),
    [
        (B, "B-8", Cost(61361360, 12277395456, 11795656704)),
        (B, "B-10", Cost(54867152, 10932541440, 10511020032)),
        (S, "S-6", Cost(17561168, 3570336768, 3299358720)),
        (S, "S-8", Cost(15936080, 3219068928, 2978199552)),
        ("deit_base_patch16_224", "B-10", Cost(54096616, 10875032064, 10457757696)),
        ("deit_small_patch16_224", "S-8", Cost(15550312, 3201512448, 2963069952)),
    ],
)
def test_hetdpt_models(dense: dict[str, nn.Module], arch: str, layers: str, cost: Cost) -> None:
    """The published mode keeps norm1 of a removed attention; dropping the branch saves its 2 D parameters as well."""
    attentions, activations = LAYERS[layers]
    assert (
        count_cost(pruned(dense[arch], arch, attentions, activations, "norm_identity", folded=True), IMAGENET) == cost
    )
    dropped = count_cost(pruned(dense[arch], arch, attentions, activations, "drop", folded=True), IMAGENET)
    width = dense[arch].embed_dim
    assert dropped == Cost(cost.params - 2 * width * len(attentions), cost.macs, cost.macs_linear)


def test_removing_alone_saves_nothing_in_ffns(dense: dict[str, nn.Module]) -> None:
    """The trainable parameters that HetDPT's training log of DeiT-B without 10 layers shows."""
    assert count_cost(pruned(dense[B], B, *LAYERS["B-10"], "norm_identity", folded=False), IMAGENET).params == 75526352


def test_the_published_dropped_count(dense: dict[str, nn.Module]) -> None:
    assert count_cost(pruned(dense[B], B, *LAYERS["B-10"], "drop", folded=True), IMAGENET).params == 54859472


# --------------------------------------------------------------------------------------------- other published models

GIANT = "vit_giant_patch14_dinov2"
GIANT_ARGS = {"img_size": 224, "num_classes": 100}
SWIN_T, SWIN_S, SWIN_B = (f"swin_{size}_patch4_window7_224" for size in ("tiny", "small", "base"))


@pytest.fixture(scope="module")
def giant() -> nn.Module:
    return meta(GIANT, **GIANT_ARGS)


@pytest.mark.parametrize(
    ("attentions", "ffns", "published"),
    [(0, 0, 1134.92), (12, 0, 1021.55), (8, 7, 927.12)],
    ids=["dense", "NOSE", "-15"],
)
def test_dinov2_giant_without_whole_branches(giant: nn.Module, attentions: int, ffns: int, published: float) -> None:
    """HetDPT's table of DINOv2-Giant on CIFAR-100: only whole FFNs, with norm and LayerScale, give its parameters."""
    plan = depth_plan(giant, Plan(GIANT, GIANT_ARGS), range(attentions), range(ffns), gated_ffn="drop_ffn")
    cost = sum(p.numel() for p in apply_to_copy(giant, plan).parameters())
    branch = {"attention": 9443328 + 3072 + 1536, "ffn": 18884096 + 3072 + 1536}
    assert cost == 1134923364 - attentions * branch["attention"] - ffns * branch["ffn"]
    assert round(cost / 1e6, 2) == published


def test_the_published_size_of_dinov2_giant_has_one_reading() -> None:
    """Any 15 layers; FFNs gone as a whole or folded to one layer; norms and LayerScales gone with them or not."""
    width, fits = 1536, []
    for attentions, whole, norms, scales in itertools.product(range(16), (True, False), (True, False), (True, False)):
        attention = 9443328 + 2 * width * norms + width * scales
        ffn = 18884096 + 2 * width * norms + width * scales if whole else 18884096 - width**2 - width
        left = 1134923364 - attentions * attention - (15 - attentions) * ffn
        for folded in (0, 80 - 15 * scales * whole - attentions * scales * (not whole)):  # LayerScales left to fold
            if round((left - folded * width) / 1e6, 2) == 927.12:
                fits.append((attentions, 15 - attentions, whole, norms, scales, folded))
    assert fits == [(8, 7, True, True, True, 0)]


@pytest.mark.parametrize("stand_in", ["mean_gate", "drop_gate"])
def test_dinov2_giant_with_folded_ffns(giant: nn.Module, stand_in: str) -> None:
    """No number of folded SwiGLU FFNs reaches the published 927.12 M: 15 layers leave more, whatever their split."""
    width, smallest = 1536, []
    for ffns in (7, 15):
        plan = depth_plan(giant, Plan(GIANT, GIANT_ARGS), range(15 - ffns), range(ffns), gated_ffn=stand_in)
        small = apply_to_copy(giant, plan)
        after = sum(p.numel() for p in small.parameters())
        assert 1134923364 - after == (15 - ffns) * 9447936 + ffns * 4096 * (width + 1)
        folded_plan, _ = fold_linears(small, plan)
        assert sum(name.endswith(".mlp") for name in folded_plan.folded) == ffns
        assert isinstance(small.blocks[0].mlp, nn.Linear)
        pairs = 15 - ffns  # LayerScales of removed attentions are gone already
        scales = (40 - pairs) + 40
        expected = 1134923364 - pairs * 9447936 - ffns * (18884096 - width**2 - width) - scales * width
        assert sum(p.numel() for p in small.parameters()) == expected
        smallest.append(expected)
    assert all(round((count + 80 * width) / 1e6, 2) != 927.12 for count in smallest)


@pytest.mark.parametrize(
    ("arch", "cost"),
    [
        (SWIN_T, Cost(28288354, 4490566656, 4350425088)),
        (SWIN_S, Cost(49606258, 8740875264, 8512223232)),
        (SWIN_B, Cost(87768224, 15430946816, 15126077440)),
        ("swin_large_patch4_window7_224", Cost(196532476, 34475759616, 34018455552)),
        ("swin_s3_tiny_224", Cost(28328674, 4623332352, 4350425088)),
        ("pvt_v2_b0", Cost(3666760, 566065664, 527956992)),
        ("pvt_v2_b1", Cost(14009000, 2108355584, 2032138240)),
        ("pvt_v2_b2_li", Cost(22553512, 3888850944, 3746250752)),
        ("pvt_v2_b5", Cost(81956008, 11717260288, 11346008064)),
    ],
)
def test_dense_models_of_stages(arch: str, cost: Cost) -> None:
    """Published, in millions and G: Swin 28.3 / 4.5, 49.6 / 8.7, 87.8 / 15.4; PVTv2 3.7 / 0.6, 14.0 / 2.1."""
    assert count_cost(meta(arch), IMAGENET) == cost


@pytest.mark.parametrize(
    ("arch", "attentions", "activations", "params_m", "macs_g"),
    [
        (SWIN_T, [4, 5, 10], [2, 4], 23.4, 3.7),
        (SWIN_S, range(4, 11), [2, 3, 4], 43.9, 7.3),
        (SWIN_B, [*range(4, 10)], [2, *range(4, 14), 22], 55.3, 9.8),
    ],
)
def test_published_swin_sizes_have_a_reading(
    arch: str, attentions: list, activations: list, params_m: float, macs_g: float
) -> None:
    """The layers of HetDPT's Swin rows are not published; these are one set each of their size and MACs."""
    model = meta(arch)
    small = pruned(model, arch, attentions, activations, "norm_identity", folded=True)
    cost = count_cost(small, IMAGENET)
    assert (round(cost.params / 1e6, 1), round(cost.macs / 1e9, 1)) == (params_m, macs_g)
    without_attention = [
        small.get_submodule(f"layers.2.blocks.{number - 4}") for number in attentions if 4 <= number < 10
    ]
    kinds = {type(module).__name__ for block in without_attention for module in block.modules()}
    assert kinds.isdisjoint({"WindowAttention", "ShiftedWindowAttention", "SwinTransformerBlock"})


DEPTH = 5
sets = st.lists(st.integers(0, DEPTH - 1), unique=True)


@settings(max_examples=20, deadline=None)
@given(sets, sets, st.sampled_from(["drop", "norm_identity", "double"]))
def test_the_closed_form_holds_for_any_layers(attentions: list[int], activations: list[int], bypass: str) -> None:
    width, tokens, patches = 192, 198, 196
    cost = count_cost(pruned(TINY, T, attentions, activations, bypass, folded=True), IMAGENET)
    params = 769 * width + 2 * width + tokens * width + 2 * width + 2 * (1000 * width + 1000)
    linear, matmuls = patches * 768 * width + 2 * 1000 * width, 0
    for index in range(DEPTH):
        kept = index not in attentions
        params += 2 * width + (2 * width if kept or bypass == "norm_identity" else 0)
        params += (4 * width**2 + 4 * width) * kept
        params += width**2 + width if index in activations else 8 * width**2 + 5 * width
        linear += tokens * (4 * width**2 * kept + (width**2 if index in activations else 8 * width**2))
        matmuls += 2 * tokens**2 * width * kept
    assert cost == Cost(params, linear + matmuls, linear)


TINY = meta(T, depth=DEPTH)


def expected_macs(variant: str) -> tuple[int, int]:
    """Linear work and attention products of the dense model of one row."""
    row, model = contract(variant), build(variant)
    return {"vit": vit_macs, "eva": vit_macs, "beit": vit_macs, "swin": swin_macs, "pvt": pvt_macs}[row.family](
        row, model
    )


def vit_macs(row: Contract, model: nn.Module) -> tuple[int, int]:
    height, width = row.image_size
    patches, depth = (height // 4) * (width // 4), row.arch_args["depth"]
    tokens, heads = patches + model.num_prefix_tokens, 2 if hasattr(model, "head_dist") else 1
    gated = "giant" in row.arch or "plus" in row.arch or "eva02" in row.arch or "swiglu_mlp" in row.args
    ffn = 2 + 4 if gated else 2 + 2  # gate and values, each twice as wide as the stream
    linear = patches * 48 * 16 + depth * tokens * (4 + ffn) * 16 * 16 + heads * 16 * 5
    products = depth * 2 * tokens * tokens * 16
    if getattr(model, "attn_pool", None) is not None:  # one query, and keys and values of every token
        hidden = model.attn_pool.mlp.fc1.out_features
        linear, products = linear + ((2 * tokens + 2) * 16 + 2 * hidden) * 16, products + 2 * tokens * 16
    return linear, products


def swin_macs(row: Contract, model: nn.Module) -> tuple[int, int]:
    """Attention works on whole windows, padding included; FFNs on the tokens."""
    args = row.arch_args
    height, width = (size // 2 for size in row.image_size)
    linear, products = height * width * 12 * 16 + 32 * 5, 0
    for stage, depth in enumerate(args["depths"]):
        channels = 16 * 2**stage
        inner = 4 * args["head_dim"] if "head_dim" in args else channels
        if stage:
            height, width = -(-height // 2), -(-width // 2)
            linear += height * width * 4 * 16 * 32
        windows = -(-height // 4) * -(-width // 4)
        linear += depth * (windows * 16 * 4 * channels * inner + height * width * 4 * channels * channels)
        products += depth * windows * 2 * 16 * 16 * inner
    return linear, products


def pvt_macs(row: Contract, model: nn.Module) -> tuple[int, int]:
    """A 7x7 stem of stride 4 and a 3x3 one of stride 2; keys and values of half the height and width, or of 7x7."""
    height, width = (size // 4 for size in row.image_size)
    linear, products = height * width * 3 * 49 * 16 + 32 * 5, 0
    for stage, depth in enumerate(row.arch_args["depths"]):
        channels, kernel = 16 * 2**stage, 2 if stage == 0 else 0
        if stage:
            height, width = height // 2, width // 2
            linear += height * width * 16 * 9 * 32
        tokens, reduced = height * width, height * width // 4 if stage == 0 else height * width
        if row.arch_args.get("linear"):
            kernel, reduced = 1, 49
        attention = (2 * tokens + 2 * reduced + kernel**2 * reduced) * channels**2
        linear += depth * (attention + tokens * (4 * channels**2 + 9 * 2 * channels))
        products += depth * 2 * tokens * reduced * channels
    return linear, products


@every_variant
def test_every_variant_is_counted_by_the_closed_form(variant: str) -> None:
    model = build(variant)
    linear, products = expected_macs(variant)
    cost = count_cost(model, (3, *contract(variant).image_size))
    assert cost == Cost(sum(p.numel() for p in model.parameters()), linear + products, linear)


def test_sliced_widths_are_counted() -> None:
    """4 patches and a class token: 5 tokens; q and k 8 wide, v 12, hidden 10, stream 6."""
    model = build("plain", depth=1)
    kept = {"blocks.0.qk": tuple(range(8)), "blocks.0.v": tuple(range(12)), "blocks.0.mlp": tuple(range(10))}
    plan = replace(contract("plain").plan, kept={**kept, "residual": tuple(range(6))})
    linear = 4 * 48 * 6 + 5 * (6 * (8 + 8 + 12) + 12 * 6 + 2 * 6 * 10) + 6 * 5
    products = 5 * 5 * (8 + 12)
    cost = count_cost(apply_plan(model, plan), (3, 8, 8))
    assert (cost.macs_linear, cost.macs) == (linear, linear + products)


def test_measuring_leaves_the_model_alone() -> None:
    model = build("plain").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    count_cost(model, (3, 8, 8))
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert vars(Cost(1, 2, 3)) == {"params": 1, "macs": 2, "macs_linear": 3}


def test_counting_keeps_what_is_trained() -> None:
    """Models of shapes alone are counted without a copy."""
    model = build("plain", dtype=torch.float32).to("meta").eval()
    frozen = next(iter(model.parameters()))
    frozen.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    count_cost(model)
    assert [p.requires_grad for p in model.parameters()] == before


def test_a_model_with_computed_weights_is_rejected_by_the_name_of_its_layer() -> None:
    model = build("plain")
    l1_unstructured(model.get_submodule("blocks.1.attn.qkv"), "weight", 0.5)
    with pytest.raises(UnsupportedModelError, match=r"cannot be copied: blocks\.1\.attn\.qkv\.weight was computed"):
        count_cost(model)
