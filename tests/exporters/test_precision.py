"""Half precision with fp32 layers: their weights and results stay in fp32, and unknown layers are errors."""

from collections.abc import Sequence
from copy import deepcopy

import pytest
import torch
from contracts import build, images
from pruned_models import pruned
from too_large import large_ffn
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from vitcompress.errors import InputError, PrecisionError
from vitcompress.exporters.onnx.export import check_options
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.precision import convert_precision, expand_layers, present_layers, shorten_layers
from vitcompress.exporters.uint8 import tensors_of

X = images("plain", dtype=torch.float32)


def plain() -> nn.Module:
    return build("plain", dtype=torch.float32)


@torch.no_grad()
def logits(model: nn.Module, islands: Sequence[str] = (), precision: str = "fp16", images: Tensor = X) -> Tensor:
    out: Tensor = convert_precision(model, precision, islands)(images)
    return out


@torch.no_grad()
def test_fp32_is_a_copy_with_the_same_outputs() -> None:
    model = plain()
    assert torch.equal(logits(model, precision="fp32"), model(X))


def test_an_empty_buffer_has_no_largest_value() -> None:
    model = plain()
    model.register_buffer("unused", torch.empty(0))
    assert torch.equal(logits(model), logits(plain()))


def test_layer_names_are_in_the_order_of_the_model() -> None:
    assert expand_layers(plain(), ("head", "blocks.1.mlp", "softmax")) == (
        "blocks.0.attn.softmax",
        "blocks.1.attn.softmax",
        "blocks.1.mlp",
        "head",
    )
    assert expand_layers(plain(), ("norm",))[:2] == ("blocks.0.norm1", "blocks.0.norm2")


@pytest.mark.parametrize(("variant", "name"), [("dinov3", "blocks"), ("beit", "blocks"), ("pvt", "stages.0.blocks")])
def test_a_list_of_blocks_stays_in_fp32(variant: str, name: str) -> None:
    """It has no forward pass in EVA, DINOv3, BEiT and PVTv2: its blocks got half precision, and exports failed."""
    model, x = build(variant, dtype=torch.float32), images(variant, dtype=torch.float32)
    blocks = [f"{name}.{number}" for number, _ in model.get_submodule(name).named_children()]
    assert torch.equal(logits(model, (name,), images=x), logits(model, blocks, images=x))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_attention_leaves_torch_as_it_is(error: type[BaseException]) -> None:
    """Products in half precision would be computed in fp32 afterwards, in the whole process."""
    model, one = convert_precision(plain(), "fp16", ("softmax",)), torch.ones(2, 2, dtype=torch.float16)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain().named_parameters()]

    def interrupt(*_: object) -> None:
        raise error

    model.get_submodule("blocks.1.attn.proj").register_forward_pre_hook(interrupt)
    with pytest.raises(error):
        model(X)
    assert (one @ one).dtype == torch.float16 and not _get_current_function_mode_stack()


def test_a_folded_ffn_is_one() -> None:
    dense, model, plan = pruned("plain")
    assert plan.folded == ("blocks.1.mlp",)
    for one in (dense, model):
        assert expand_layers(one, ("ffn",)) == ("blocks.0.mlp", "blocks.1.mlp")


def test_a_pool_has_an_attention_and_an_ffn() -> None:
    pooled = build("attention_pool", dtype=torch.float32)
    assert expand_layers(pooled, ("softmax", "ffn"))[-2:] == ("attn_pool.softmax", "attn_pool.mlp")


def test_layers_inside_an_fp32_layer_are_omitted() -> None:
    assert expand_layers(plain(), ("blocks.0", "norm", "softmax")) == (
        "blocks.0",
        "blocks.1.norm1",
        "blocks.1.attn.softmax",
        "blocks.1.norm2",
        "norm",
    )
    kept = logits(plain(), ("blocks.0.mlp", "blocks.0.mlp.fc1"))
    assert torch.equal(kept, logits(plain(), ("blocks.0.mlp",)))


def test_short_names_expand_to_the_same_layers() -> None:
    model, names = plain(), expand_layers(plain(), ("norm", "head", "blocks.0.mlp"))
    assert shorten_layers(model, names) == ("norm", "head", "blocks.0.mlp")
    assert expand_layers(model, shorten_layers(model, names)) == names
    assert shorten_layers(model, names[1:])[0] == "head"
    assert present_layers(model, ("norm", "blocks.1.attn.softmax", "blocks.7", "blocks.0.mlp.softmax")) == (
        "norm",
        "blocks.1.attn.softmax",
    )


@pytest.mark.parametrize("wrong", ["blocks.9", "blocks.0.mlp.softmax", "", "norms"])
def test_an_unknown_layer(wrong: str) -> None:
    with pytest.raises(InputError, match="no layer"):
        convert_precision(plain(), "fp16", (wrong,))
    with pytest.raises(InputError, match="the whole model is fp32"):
        check_options(ExportOptions(islands=("norm",)))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "islands", [(), ("norm",), ("softmax",), ("head",), ("norm", "softmax", "head"), ("patch_embed",)]
)
def test_only_the_weights_of_fp32_layers_are_fp32(precision: str, islands: tuple[str, ...]) -> None:
    model = convert_precision(plain(), precision, islands)
    names = [name for name in expand_layers(plain(), islands) if not name.endswith(".softmax")]
    for name, parameter in model.named_parameters():
        inside = any(name.startswith(f"{island}.") for island in names)
        assert (parameter.dtype == torch.float32) == inside, name
    assert model(X).dtype == torch.float32


@torch.no_grad()
def test_in_float64_the_casts_do_nothing() -> None:
    """With weights that half precision holds exactly, the double of the deployed module is the double of the model."""
    model = plain().half().float()
    for islands in ((), ("norm", "softmax", "head")):
        wide = deepcopy(convert_precision(model, "fp16", islands)).double()
        assert torch.equal(wide(X.double()), deepcopy(model).double()(X.double()))


@torch.no_grad()
@pytest.mark.parametrize("variant", ["pvt", "attention_pool"])
def test_layers_inside_an_attention_with_an_fp32_core(variant: str) -> None:
    """A norm or an FFN that is part of an attention (PVTv2) or of a pool (SigLIP), beside the core of the latter."""
    model, x = build(variant, dtype=torch.float32).half().float(), images(variant, dtype=torch.float32)
    deployed = convert_precision(model, "fp16", ("norm", "softmax", "ffn"))
    assert tensors_of(deployed).keys() == {name for name, tensor in model.state_dict().items() if tensor.dim()}
    assert torch.equal(deployed.double()(x.double()), deepcopy(model).double()(x.double()))
    assert not torch.equal(logits(model, ("norm", "softmax"), images=x), logits(model, ("norm",), images=x))


@torch.no_grad()
def test_every_kind_of_fp32_layer_changes_the_outputs() -> None:
    """Each kind in fp32 changes the outputs, and a head in fp32 returns logits that fp16 cannot represent."""
    bare = logits(plain())
    assert torch.equal(bare, bare.half().float())
    assert not torch.equal(logits(plain(), ("head",)), logits(plain(), ("head",)).half().float())
    for island in ("norm", "softmax", "blocks.0"):
        assert not torch.equal(logits(plain(), (island,)), bare)


@torch.no_grad()
def test_an_ffn_in_fp32_does_not_overflow() -> None:
    model = large_ffn(plain())
    assert not torch.isfinite(logits(model)).all()
    kept = logits(model, ("blocks.0.mlp",))
    assert torch.isfinite(kept).all()
    # Half precision rounds by 2**-11 each time, some forty times from the images to the logits of two blocks.
    torch.testing.assert_close(kept, model(X), rtol=0, atol=40 * 2.0**-11 * float(model(X).abs().max()))


@torch.no_grad()
def test_a_large_weight_is_accepted_in_an_fp32_layer() -> None:
    model = plain()
    model.get_submodule("head").weight[0, 0] = 1e6
    message = r"head\.weight has the value 1e\+06, the largest in half precision is 65504"
    with pytest.raises(PrecisionError, match=message) as caught:
        convert_precision(model, "fp16")
    assert caught.value.hint == "use --islands head or auto, or --precision bf16 or fp32"
    assert torch.isfinite(logits(model, ("head",))).all()
    assert torch.isfinite(logits(model, precision="bf16")).all()
