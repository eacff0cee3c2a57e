"""Families outside of vitcompress: recipes/examples/my_family.py, and one of models with tables of positions."""

import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import timm
import torch
from contracts import assert_moved, assert_same, kept_channels, logits, masks, sites_of, spaces_of
from timm.models.vision_transformer_relpos import RelPosAttention, RelPosBlock, VisionTransformerRelPos
from torch import Tensor, nn

import vitcompress as vc
from vitcompress.errors import InputError, PlanError
from vitcompress.exporters.onnx.file import read_contents as onnx_contents
from vitcompress.exporters.openvino.export import OPENVINO, read_contents
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.quantize.calibrate import calibrate
from vitcompress.families import FAMILIES, Axis, Family, Space
from vitcompress.families.attention import AnyWidthAttention
from vitcompress.families.base import input_axis, linear_axes, norm_axes
from vitcompress.families.edited_block import Wiring
from vitcompress.models.create import input_config, plan_of
from vitcompress.surgery import apply_to_copy
from vitcompress.surgery.masks import mask_channels
from vitcompress.verify.weights import compare_tensors

EXAMPLE = Path(__file__).parents[2] / "recipes" / "examples" / "my_family.py"
ARCH = "cait_xxs24_224"
ARGS = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "depth_token_only": 1}
X = torch.randn(3, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "cait", runpy.run_path(str(EXAMPLE))["CAIT"])


def model(create: Callable[..., nn.Module] = vc.create_model, **changes: Any) -> nn.Module:
    """A CaiT with random values in all parameters."""
    created = create(ARCH, **{**ARGS, "num_classes": 5, **changes}).double().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in created.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return created


@pytest.mark.parametrize("whole_heads", [False, True])
def test_masked_equals_sliced(whole_heads: bool) -> None:
    """Also the layers that mix the heads of an attention: they read and write one value per head."""
    dense = model()
    kept = kept_channels(dense, {"qk", "v", "mlp", "residual"}, whole_heads=whole_heads)
    heads = {space.attention: 2 for space in spaces_of(dense).values() if whole_heads and space.attention}
    with mask_channels(dense, masks(dense, kept)):
        masked = logits(dense, X)
    assert_moved(masked, logits(dense, X))
    small = apply_to_copy(dense, dense.plan.delta(kept=kept, heads=heads))
    assert_same(logits(small, X), masked)
    assert small.blocks[0].attn.proj_w.weight.shape == ((2, 2) if whole_heads else (4, 4))


def test_attentions_and_activations_are_removed_and_folded(tmp_path: Path) -> None:
    dense = model()
    sites = [site.name for kind in ("attention", "activation") for site in sites_of(dense, kind)]
    plan = dense.plan.delta(removed={sites[0]: "drop", sites[2]: "identity"})
    small = vc.prune(dense, plan)
    assert_moved(logits(small, X), logits(dense, X))
    folded = vc.fold(small)
    assert_same(logits(folded, X), logits(small, X))
    vc.save_model(folded, tmp_path / "run")
    assert_same(logits(vc.load_model(tmp_path / "run"), X), logits(folded, X))


def test_sero_prunes_heads_with_parameters_of_their_own() -> None:
    data = [(torch.randn(8, 3, 8, 8), torch.randint(5, (8,))) for _ in range(4)]
    dense = model().float()
    options = {"sparsity": 0.4, "round_to": 2, "epochs": 2, "warmup_epochs": 0}
    small = vc.prune(dense, vc.plan(dense, "sero", data, training={"batch_size": 8}, **options))
    assert sum(p.numel() for p in small.parameters()) < 0.9 * sum(p.numel() for p in dense.parameters())


def test_upvit_rejects_heads_with_parameters_of_their_own() -> None:
    with pytest.raises(PlanError, match="cait models: each head has a relative position table or other parameters"):
        vc.plan(model().float(), "upvit", target_args={"embed_dim": 8})


def test_a_model_of_timm_is_pruned() -> None:
    """timm records its image size as two numbers and its pooling as a word."""
    dense = model(timm.create_model)
    plan = plan_of(dense)
    assert plan.arch_args["img_size"] == [8, 8] and plan.arch_args["global_pool"] == "token"
    small = vc.prune(dense, plan.delta(removed={"blocks.0.attn": "drop"}))
    assert_moved(logits(small, X), logits(dense, X))
    assert vc.create_model(ARCH, **ARGS, global_pool="avg").global_pool == "avg"


@pytest.mark.parametrize(
    "args", [{"checkpoint_path": "weights"}, {"act_layer": "a.b"}, {"pretrained_cfg": "x"}, {"num_heads": [1] * 9}]
)
def test_arguments_of_its_models_are_plain_data(args: dict[str, Any]) -> None:
    """Other arguments could read files."""
    with pytest.raises(InputError, match=next(iter(args))):
        vc.create_model(ARCH, **{**ARGS, **args})


@pytest.mark.skipif(OPENVINO.unavailable() is not None, reason="OpenVINO is not installed")
def test_weights_of_layers_on_vectors_are_matched_in_int8(tmp_path: Path) -> None:
    """q of timm's ClassAttn reads (batch, channels): its weight is not transposed, its scale is that of the rows."""
    small = model().float()
    about: Any = {"input": input_config(small), "calibrate": lambda source: calibrate(source, X.float(), "int8")}
    path = OPENVINO.export(small, tmp_path / "m.xml", options=ExportOptions(precision="int8"), **about).path
    contents = read_contents(path)
    assert any("token_only.0.attn.q.weight_quantized" in stored.name for stored in contents.tensors)
    assert not compare_tensors(small, contents).problems


class SlicedTables(AnyWidthAttention):
    """timm's RelPosAttention with a table of its own, whose index is flat and whose parts are in a module."""

    PARTS = (*AnyWidthAttention.PARTS, "rel_pos")

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        return self.attend(*self.project(x), attn_mask=self.rel_pos.get_bias())


class TableFamily(Family):
    name = "tables"
    supported = "timm VisionTransformerRelPos models with tables"
    model_type, block_type = VisionTransformerRelPos, RelPosBlock
    sliced: ClassVar = {RelPosAttention: SlicedTables}
    branches = ("norm1", "attn", "ls1", "drop_path1"), ("norm2", "mlp", "ls2", "drop_path2")
    wiring = Wiring(branches=branches, takes_arguments=frozenset({"attn"}))

    def streams(self, model: Any, axes: Mapping[str, Iterable[Axis]]) -> Iterator[Space]:
        residual = [*linear_axes(model, "patch_embed.proj"), *(axis for own in axes.values() for axis in own)]
        yield Space("residual", "residual", 16, (*residual, *norm_axes(model, "fc_norm"), input_axis("head")))

    def set_width(self, model: Any, space: str, width: int) -> None:
        model.embed_dim = model.num_features = model.head_hidden_size = width


def test_position_biases_of_timm_modules_with_a_flat_index_are_those_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "tables", TableFamily())
    sizes = {name: ARGS[name] for name in ("img_size", "patch_size", "embed_dim", "depth", "num_heads")}
    dense = vc.create_model("vit_relpos_small_patch16_224", **sizes, rel_pos_type="bias", num_classes=5)
    small = vc.prune(dense, dense.plan.delta(kept=kept_channels(dense, {"qk", "v"})))
    vc.save_model(small, tmp_path)
    vc.export(small, tmp_path / "model.onnx")
    assert vc.verify(tmp_path).passed
    with torch.no_grad():
        small.get_parameter("blocks.1.attn.rel_pos.relative_position_bias_table")[0] += 0.1
    problems = compare_tensors(small, onnx_contents(tmp_path / "model.onnx")).problems
    assert "blocks.1.attn.rel_pos.relative_position_bias_table" in " ".join(problems)
