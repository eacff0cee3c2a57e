"""Half precision with islands of fp32: what stays wide stays wide, what is asked for exists, nothing is guessed."""

from collections.abc import Sequence
from copy import deepcopy

import pytest
import torch
from contracts import build, images
from too_large import large_ffn
from torch import Tensor, nn

from vitcompress.errors import InputError, PrecisionError
from vitcompress.exporters.precision import expanded, in_precision, in_short, present

X = images("plain", dtype=torch.float32)


def plain() -> nn.Module:
    return build("plain", dtype=torch.float32)


@torch.no_grad()
def answers(model: nn.Module, islands: Sequence[str] = (), precision: str = "fp16") -> Tensor:
    out: Tensor = in_precision(model, precision, islands)(X)
    return out


@torch.no_grad()
def test_fp32_is_a_copy_that_answers_the_same() -> None:
    model = plain()
    assert torch.equal(answers(model, precision="fp32"), model(X))


def test_names_of_islands_in_the_order_of_the_model() -> None:
    assert expanded(plain(), ("head", "blocks.1.mlp", "softmax")) == (
        "blocks.0.attn.softmax",
        "blocks.1.attn.softmax",
        "blocks.1.mlp",
        "head",
    )
    assert expanded(plain(), ("norm",))[:2] == ("blocks.0.norm1", "blocks.0.norm2")


def test_a_pool_has_an_attention_and_an_ffn() -> None:
    pooled = build("attention_pool", dtype=torch.float32)
    assert expanded(pooled, ("softmax", "ffn"))[-2:] == ("attn_pool.softmax", "attn_pool.mlp")


def test_what_lies_inside_an_island_is_not_one_of_its_own() -> None:
    assert expanded(plain(), ("blocks.0", "norm", "softmax")) == (
        "blocks.0",
        "blocks.1.norm1",
        "blocks.1.attn.softmax",
        "blocks.1.norm2",
        "norm",
    )
    kept = answers(plain(), ("blocks.0.mlp", "blocks.0.mlp.fc1"))
    assert torch.equal(kept, answers(plain(), ("blocks.0.mlp",)))


def test_short_names_stand_for_the_same_islands() -> None:
    model, names = plain(), expanded(plain(), ("norm", "head", "blocks.0.mlp"))
    assert in_short(model, names) == ("norm", "head", "blocks.0.mlp")
    assert expanded(model, in_short(model, names)) == names
    assert in_short(model, names[1:])[0] == "head"
    assert present(model, ("norm", "blocks.1.attn.softmax", "blocks.7", "blocks.0.mlp.softmax")) == (
        "norm",
        "blocks.1.attn.softmax",
    )


@pytest.mark.parametrize("wrong", ["blocks.9", "blocks.0.mlp.softmax", "", "norms"])
def test_an_island_that_is_not_there(wrong: str) -> None:
    with pytest.raises(InputError, match="no part"):
        in_precision(plain(), "fp16", (wrong,))
    with pytest.raises(InputError, match="fp32 too"):
        in_precision(plain(), "fp32", ("norm",))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "islands", [(), ("norm",), ("softmax",), ("head",), ("norm", "softmax", "head"), ("patch_embed",)]
)
def test_the_weights_of_islands_and_only_those_are_fp32(precision: str, islands: tuple[str, ...]) -> None:
    model = in_precision(plain(), precision, islands)
    names = [name for name in expanded(plain(), islands) if not name.endswith(".softmax")]
    for name, parameter in model.named_parameters():
        own = name.removeprefix("model.").replace(".attention", "")
        inside = any(own.startswith(f"{island}.") for island in names)
        assert (parameter.dtype == torch.float32) == inside, name
    assert model(X).dtype == torch.float32


@torch.no_grad()
def test_in_float64_the_casts_do_nothing() -> None:
    """With weights that half precision holds exactly, the double of the deployed module is the double of the model."""
    model = plain().half().float()
    for islands in ((), ("norm", "softmax", "head")):
        wide = deepcopy(in_precision(model, "fp16", islands)).double()
        assert torch.equal(wide(X.double()), deepcopy(model).double()(X.double()))


@torch.no_grad()
def test_with_everything_in_an_island_half_precision_changes_only_what_passes_between() -> None:
    """Each of the parts in fp32 moves the answers, and a head in fp32 gives logits that fp16 cannot hold."""
    bare = answers(plain())
    assert torch.equal(bare, bare.half().float())
    assert not torch.equal(answers(plain(), ("head",)), answers(plain(), ("head",)).half().float())
    for island in ("norm", "softmax", "blocks.0"):
        assert not torch.equal(answers(plain(), (island,)), bare)


@torch.no_grad()
def test_an_overflow_inside_an_ffn_is_gone_in_an_island() -> None:
    model = large_ffn(plain())
    assert not torch.isfinite(answers(model)).all()
    kept = answers(model, ("blocks.0.mlp",))
    assert torch.isfinite(kept).all()
    # Half precision rounds by 2**-11 each time, some forty times from the images to the logits of two blocks.
    torch.testing.assert_close(kept, model(X), rtol=0, atol=40 * 2.0**-11 * float(model(X).abs().max()))


@torch.no_grad()
def test_a_weight_that_half_precision_cannot_hold_may_lie_in_an_island() -> None:
    model = plain()
    model.get_submodule("head").weight[0, 0] = 1e6
    with pytest.raises(PrecisionError, match=r"head\.weight holds 1e\+06, half precision ends at 65504") as caught:
        in_precision(model, "fp16")
    assert caught.value.hint == "use --islands head or auto, or --precision bf16 or fp32"
    assert torch.isfinite(answers(model, ("head",))).all()
    assert torch.isfinite(answers(model, precision="bf16")).all()
