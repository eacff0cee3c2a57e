"""The smallest models of every family, on which the contract tests run: (family, variant) -> timm name and arguments.

A new family adds rows here; the tests in tests/families, tests/surgery, tests/models and others then cover it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import timm
import torch
from layer_plans import depth_plan
from torch import Tensor, nn

from vitcompress.families import Site, Space, family_of, prepare_model
from vitcompress.methods.depth import blocks_of
from vitcompress.plan import Plan
from vitcompress.surgery import apply_to_copy
from vitcompress.surgery.gates import GatedModel

# Two blocks of width 16 on 8x8 images; or three in two stages, 16 and 32 wide, the second block in shifted windows.
FLAT = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "mlp_ratio": 2.0}
SMALL = {
    "vit": FLAT,
    "eva": FLAT,
    "beit": FLAT,
    "swin": {
        "img_size": 16,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 1],
        "num_heads": [4, 4],
        "window_size": 4,
        "mlp_ratio": 2.0,
        "drop_path_rate": 0.0,
    },
    "pvt": {
        "embed_dims": [16, 32],
        "depths": [2, 1],
        "num_heads": [4, 4],
        "sr_ratios": [2, 1],
        "mlp_ratios": [2, 2],
        "pretrained_cfg_overlay": {"input_size": [3, 32, 32]},
    },
}

# Largest size in bytes of weights that torch writes into the ONNX file itself.
WEIGHTS_IN_ONE_FILE = "torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD"
BYPASSES = ["drop", "norm_identity", "double"]  # replacements of an attention


@dataclass(frozen=True)
class Contract:
    """A model of the family with the sizes of `SMALL` and other `args`.

    depth: number of blocks; in a model with stages, the last stage has one.
    """

    arch: str
    args: dict[str, Any] = field(default_factory=dict)
    family: str = "vit"

    @property
    def arch_args(self) -> dict[str, Any]:
        small, args = SMALL[self.family], dict(self.args)
        if "depth" in args and "depths" in small:
            args["depths"] = [args.pop("depth") - 1, 1]
        return {**small, "num_classes": 5, **args}

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width."""
        args = self.arch_args
        size = args["pretrained_cfg_overlay"]["input_size"][1:] if self.family == "pvt" else args["img_size"]
        return tuple(size) if isinstance(size, list) else (size, size)

    @property
    def plan(self) -> Plan:
        return Plan(self.arch, self.arch_args)


VIT, DISTILLED = "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"
SWIN, PVT, BEIT = "swin_tiny_patch4_window7_224", "pvt_v2_b0", "beit_base_patch16_224"
CONTRACTS = {
    ("vit", "plain"): Contract(VIT),
    ("vit", "distilled"): Contract(DISTILLED),
    ("vit", "registers"): Contract("vit_small_patch14_reg4_dinov2"),
    ("vit", "layer_scale"): Contract(VIT, {"init_values": 0.5}),
    ("vit", "no_qkv_bias"): Contract(VIT, {"qkv_bias": False}),
    ("vit", "avg_pooled"): Contract(VIT, {"global_pool": "avg"}),
    ("vit", "no_class_token"): Contract(VIT, {"class_token": False, "global_pool": "avg", "qkv_bias": False}),
    ("vit", "attention_pool"): Contract(VIT, {"class_token": False, "global_pool": "map"}),
    ("vit", "pre_norm"): Contract("vit_base_patch32_clip_224"),
    ("vit", "non_square"): Contract(VIT, {"img_size": [8, 12]}),
    ("vit", "dynamic_size"): Contract(VIT, {"dynamic_img_size": True}),
    ("vit", "deit3"): Contract("deit3_small_patch16_224"),
    ("vit", "no_proj_bias"): Contract(VIT, {"proj_bias": False, "init_values": 0.5}),
    ("vit", "no_position"): Contract(VIT, {"pos_embed": "none", "fc_norm": True}),
    ("vit", "swiglu"): Contract("vit_giant_patch14_dinov2", {"mlp_ratio": 4.0}),
    ("eva", "dinov3"): Contract("vit_small_patch16_dinov3", {"img_size": [8, 12]}, "eva"),
    ("eva", "rotary"): Contract("vit_small_patch16_rope_ape_224", family="eva"),
    ("eva", "rotary_pre_norm"): Contract("vit_pe_spatial_tiny_patch16_512", {"swiglu_mlp": True}, "eva"),
    ("eva", "eva_unturned"): Contract("vit_small_patch16_dinov3", {"use_rot_pos_emb": False}, "eva"),
    ("eva", "rotary_pool"): Contract("vit_pe_core_small_patch16_384", family="eva"),
    ("eva", "split_swiglu"): Contract("vit_small_plus_patch16_dinov3", family="eva"),
    ("vit", "inner_norms"): Contract(VIT, {"scale_attn_norm": True, "scale_mlp_norm": True}),
    ("eva", "inner_norms_rotary"): Contract("eva02_base_patch16_clip_224", family="eva"),
    ("eva", "packed_biases"): Contract("vit_small_patch16_dinov3_qkvb", family="eva"),
    ("beit", "beit"): Contract(BEIT, {"img_size": [8, 12]}, "beit"),
    ("beit", "beit_absolute"): Contract(
        BEIT, {"use_abs_pos_emb": True, "use_rel_pos_bias": False, "init_values": None, "global_pool": "token"}, "beit"
    ),
    ("swin", "swin"): Contract(SWIN, family="swin"),
    ("swin", "swin_padded"): Contract(SWIN, {"img_size": [10, 12], "always_partition": True}, "swin"),
    ("swin", "swin_dynamic"): Contract(SWIN, {"dynamic_img_size": True, "qkv_bias": False}, "swin"),
    ("swin", "swin_head_dim"): Contract(SWIN, {"head_dim": 6}, "swin"),
    ("pvt", "pvt"): Contract(PVT, family="pvt"),
    ("pvt", "pvt_linear"): Contract(PVT, {"linear": True}, "pvt"),
    ("pvt", "pvt_non_square"): Contract(
        PVT, {"pretrained_cfg_overlay": {"input_size": [3, 32, 48]}, "qkv_bias": False}, "pvt"
    ),
}
VARIANTS = [variant for _, variant in CONTRACTS]

every_variant = pytest.mark.parametrize("variant", VARIANTS)

# A wrong result must differ by more than this share of the output, or the test could not have failed.
MOVED = 1e-4
# Two float64 computations of the same function differ by rounding only. Longest chain of roundings on the way to one
# logit: 4 blocks of 7 sums of up to 64 terms, under 2**11; times 2**5 for LayerNorms that divide by a small deviation.
SAME = 2.0**-53 * 2**16


def contract(variant: str, **args: Any) -> Contract:
    """The row of this variant, with changed arguments."""
    row = next(row for (_, name), row in CONTRACTS.items() if name == variant)
    return Contract(row.arch, {**row.args, **args}, row.family)


def build(
    variant: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, prepared: bool = True, **args: Any
) -> nn.Module:
    """The model in eval mode with random values in all parameters, so that none is without effect.

    prepared: rewrite it as its family needs it, before its values are drawn.
    """
    row = contract(variant, **args)
    model: nn.Module = timm.create_model(row.arch, **row.arch_args).to(dtype)
    if prepared:
        prepare_model(model)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        scale = 0.5 if parameter.ndim < 2 or "token" in name or "pos_embed" in name else parameter[0].numel() ** -0.5
        center = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = (center + scale * drawn).to(dtype)
    return model.eval()


@cache
def traces(variant: str) -> dict[Any, Any]:
    """The argument `traces` of exports of `build(variant, dtype=torch.float32)`, unchanged: one trace for all tests."""
    return {}


def images(variant: str, *, count: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random images, (count, 3, height, width)."""
    height, width = contract(variant).image_size
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(
        dtype
    )


@torch.no_grad()
def logits(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest value of `b`."""
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def assert_same(a: Tensor, b: Tensor) -> None:
    assert difference(a, b) <= SAME


def assert_moved(a: Tensor, b: Tensor) -> None:
    assert difference(a, b) > MOVED


def spaces_of(model: nn.Module) -> dict[str, Space]:
    return {space.name: space for space in family_of(model).spaces(model)}


def sites_of(model: nn.Module, kind: str) -> list[Site]:
    return [site for site in family_of(model).sites(model) if site.kind == kind]


def having(model: nn.Module, kind: str, numbers: Iterable[int]) -> list[int]:
    """Those of these blocks that have a site of this kind; in PVTv2 no activation is one."""
    return [site.index for site in sites_of(model, kind) if site.index in set(numbers)]


def without_act(site: Site) -> dict[str, str]:
    """The removal of an activation that makes its FFN linear."""
    return {site.name: "mean_gate" if site.gates else "identity"}


def kept_channels(model: nn.Module, kinds: set[str], *, whole_heads: bool = False, seed: int = 0) -> dict[str, tuple]:
    """Random channels to keep of every prunable space of these kinds, equally many per head; or two whole heads."""
    generator = torch.Generator().manual_seed(seed)
    kept: dict[str, tuple] = {}
    alive: dict[str, list[int]] = {}
    for space in spaces_of(model).values():
        if space.kind not in kinds or (space.whole_heads and not whole_heads):
            continue
        per = space.size // space.heads
        shares = {"qk": per // 2, "v": per - 1, "mlp": per * 5 // 8, "residual": per * 3 // 4, "sr": per // 2}
        share = per if space.whole_heads else shares[space.kind]
        heads = list(range(space.heads))
        if whole_heads and space.attention:
            heads = alive.setdefault(
                space.attention, sorted(torch.randperm(space.heads, generator=generator)[:2].tolist())
            )
        drawn = [sorted(torch.randperm(per, generator=generator)[:share].tolist()) for _ in heads]
        kept[space.name] = tuple(h * per + c for h, channels in zip(heads, drawn, strict=True) for c in channels)
    return kept


def masks(model: nn.Module, kept: dict[str, tuple]) -> dict[Space, Tensor]:
    """Masks of ones and zeros equivalent to `kept`."""
    spaces = spaces_of(model)
    return {
        spaces[name]: torch.zeros(spaces[name].size, dtype=torch.float64).index_fill_(0, torch.tensor(channels), 1.0)
        for name, channels in kept.items()
    }


def assert_composed(model: nn.Module, plan: Plan, expected: nn.Module, x: Tensor) -> None:
    """`plan` applied to `model` gives `expected`: the same function, and parameters of the same names and shapes."""
    result = apply_to_copy(model, plan)
    shapes = [{name: tuple(t.shape) for name, t in m.state_dict().items()} for m in (result, expected)]
    assert shapes[0] == shapes[1]
    assert_same(logits(result, x), logits(expected, x))
    assert_moved(logits(expected, x), logits(model, x))


def layers(model: nn.Module) -> list[Site]:
    """The sites that take a gate."""
    return [site for site in family_of(model).sites(model) if site.kind in ("attention", "activation")]


def gated(model: nn.Module, **modes: str) -> GatedModel:
    """The model with a gate on each of its layers, in float64."""
    return add_gates(model, layers(model), **modes).double()


def add_gates(
    model: nn.Module, sites: Sequence[Site], means: Mapping[str, Tensor] | None = None, **modes: str
) -> GatedModel:
    """The model with gates on these layers. modes: fields of BypassOptions."""
    plan = depth_plan(model, Plan(""), *blocks_of(sites).values(), **modes)
    return GatedModel(model, family_of(model), plan, means or {})
