"""Gates compute what surgery deploys, give scores the true derivative, and leave no trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain, combinations

import pytest
import torch
from contracts import (
    SAME,
    assert_moved,
    assert_same,
    build,
    contract,
    difference,
    every_variant,
    images,
    kept_channels,
    logits,
    masks,
    sites_of,
    spaces_of,
)
from torch import Tensor, nn

from vitcompress.errors import PlanError
from vitcompress.families import Site, family_of
from vitcompress.families.gating import freeze_gate
from vitcompress.gates import GatedModel, channel_gates
from vitcompress.surgery import applied, apply, depth_plan

BYPASSES = ["drop", "norm_identity", "double"]
OUTPUT_ACTS = ["none", "gelu"]


def layers(model: nn.Module) -> list[Site]:
    return [site for site in family_of(model).sites(model) if site.kind in ("attention", "activation")]


def gated(model: nn.Module, **modes: str) -> GatedModel:
    return GatedModel(model, family_of(model), layers(model), **modes).double()


def subsets(sites: list[Site]) -> Iterator[tuple[Site, ...]]:
    return chain.from_iterable(combinations(sites, count) for count in range(len(sites) + 1))


# -------------------------------------------------------------------------------------------------------- layer gates


@pytest.mark.parametrize("output_act", OUTPUT_ACTS)
@pytest.mark.parametrize("bypass", BYPASSES)
@pytest.mark.parametrize("variant", ["plain", "layer_scale", "distilled", "swin_padded", "pvt"])
def test_closed_gates_compute_what_surgery_deploys(variant: str, bypass: str, output_act: str) -> None:
    """For every subset of the layers of the first two blocks; the search model is the deployed model."""
    model, x = build(variant), images(variant)
    dense = logits(model, x)
    modes = {"attention_bypass": bypass, "both_pruned_output_act": output_act}
    open_model = gated(deepcopy(model), **modes)
    for removed in subsets([site for site in layers(model) if site.index < 2]):
        for site in open_model.sites:
            open_model.set_gate(site.name, 0.0 if site in removed else 1.0)
        blocks = {kind: [s.index for s in removed if s.kind == kind] for kind in ("attention", "activation")}
        plan = depth_plan(model, contract(variant).plan, blocks["attention"], blocks["activation"], **modes)
        deployed = applied(model, plan)
        for training in (False, True):  # no drop path, no dropout: the same function in both modes
            assert_same(logits(open_model.train(training), x), logits(deployed.train(training), x))
        if removed:
            assert_moved(logits(deployed.eval(), x), dense)


@pytest.mark.parametrize("gated_ffn", ["mean_gate", "drop_gate", "drop_ffn"])
def test_closed_gates_of_gated_ffns_compute_what_surgery_deploys(gated_ffn: str) -> None:
    model, x = build("swiglu"), images("swiglu")
    dense = logits(model, x)
    open_model = gated(deepcopy(model), gated_ffn=gated_ffn)
    assert_same(logits(open_model, x), dense)
    for removed in subsets(layers(model)):
        for site in open_model.sites:
            open_model.set_gate(site.name, 0.0 if site in removed else 1.0)
        blocks = {kind: [s.index for s in removed if s.kind == kind] for kind in ("attention", "activation")}
        plan = depth_plan(
            model, contract("swiglu").plan, blocks["attention"], blocks["activation"], gated_ffn=gated_ffn
        )
        assert_same(logits(open_model, x), logits(applied(model, plan), x))
        if removed:
            assert_moved(logits(open_model, x), dense)


def test_a_gate_closed_at_its_mean_is_what_frozen_weights_deploy() -> None:
    """The gate at a given mean, the frozen weights before removal, and after it: one function."""
    model, x = build("swiglu"), images("swiglu")
    means = {"blocks.1.mlp": torch.linspace(-0.2, 1.0, 32, dtype=torch.float64)}
    open_model = GatedModel(deepcopy(model), family_of(model), layers(model)[3:], gate_means=means).double()
    open_model.set_gate("blocks.1.mlp.act", 0.0)
    expected = logits(open_model, x)
    without = logits(applied(model, depth_plan(model, contract("swiglu").plan, [], [1])), x)
    freeze_gate(model.blocks[1].mlp, means["blocks.1.mlp"])
    assert_same(logits(model, x), expected)
    assert_same(logits(applied(model, depth_plan(model, contract("swiglu").plan, [], [1])), x), expected)
    assert_moved(without, expected)


@pytest.mark.parametrize("bypass", BYPASSES)
def test_gates_on_a_model_that_lost_layers_before(bypass: str) -> None:
    model, x = build("plain"), images("plain")
    base = contract("plain").plan
    apply(model, depth_plan(model, base, [0], [1], attention_bypass=bypass))
    modes = {"attention_bypass": bypass, "both_pruned_output_act": "gelu"}
    open_model = gated(deepcopy(model), **modes)
    assert [site.name for site in open_model.sites] == ["blocks.0.mlp.act", "blocks.1.attn"]
    for removed in subsets(layers(model)):
        for site in open_model.sites:
            open_model.set_gate(site.name, 0.0 if site in removed else 1.0)
        blocks = {kind: [s.index for s in removed if s.kind == kind] for kind in ("attention", "activation")}
        deployed = applied(model, depth_plan(model, base, blocks["attention"], blocks["activation"], **modes))
        assert_same(logits(open_model, x), logits(deployed, x))


def test_output_activation_only_where_every_layer_of_the_block_is_gone() -> None:
    model, x = build("plain"), images("plain")
    with_act = GatedModel(
        deepcopy(model), family_of(model), layers(model)[:3], both_pruned_output_act="gelu"
    )  # attention and activation of block 0, attention of block 1
    without = GatedModel(deepcopy(model), family_of(model), layers(model)[:3])
    for one in (with_act, without):
        one.set_gate("blocks.1.attn", 0.0)
        one.set_gate("blocks.0.attn", 0.0)
    assert_same(logits(with_act, x), logits(without, x))
    for one in (with_act, without):
        one.set_gate("blocks.0.mlp.act", 0.0)
    assert_moved(logits(with_act, x), logits(without, x))


@pytest.mark.parametrize("bypass", BYPASSES)
@pytest.mark.parametrize("variant", ["plain", "layer_scale"])
def test_half_open_gates_interpolate(variant: str, bypass: str) -> None:
    """NOSE's dilution: (2 - g) x + g f(x) when it doubles, else x + g f(x) + (1 - g) stand-in."""
    model, x = build(variant, depth=1), torch.randn(2, 5, 16, dtype=torch.float64)
    block = model.blocks[0]
    with torch.no_grad():
        normed = block.norm1(x)
        branch = block.ls1(block.attn(normed))
        stand = {"drop": torch.zeros_like(x), "norm_identity": block.ls1(normed), "double": x}[bypass]
        mixed = x + 0.3 * branch + 0.7 * stand
        hidden = block.mlp.fc1(block.norm2(mixed))
        act = 0.6 * nn.functional.gelu(hidden) + 0.4 * hidden
        expected = mixed + block.ls2(block.mlp.fc2(act))
    before = logits(block, x)
    open_model = gated(model, attention_bypass=bypass)
    assert torch.equal(logits(block, x), before)
    open_model.set_gate("blocks.0.attn", 0.3)
    open_model.set_gate("blocks.0.mlp.act", 0.6)
    assert_same(logits(block, x), expected)
    assert_moved(expected, before)


@contextmanager
def interpolated(model: nn.Module, site: Site, bypass: str, scalar: Tensor) -> Iterator[None]:
    """The same interpolation written for autograd: nothing straight-through, `scalar` is a part of the graph."""
    stream: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        stream[:] = [args[0]]

    def mix(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        stand = args[0]
        if site.kind == "attention":
            stand = {"drop": 0 * out, "norm_identity": args[0], "double": stream[0]}[bypass]
        return scalar * out + (1 - scalar) * stand

    doubles = bypass == "double" and site.kind == "attention"
    block = model.get_submodule(site.block)
    target = block.drop_path1 if doubles else model.get_submodule(site.name)
    handles = [block.register_forward_pre_hook(keep), target.register_forward_hook(mix)]
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("bypass", BYPASSES)
@pytest.mark.parametrize("variant", ["plain", "layer_scale", "swin", "pvt"])
def test_a_score_receives_the_derivative_with_respect_to_its_gate(variant: str, bypass: str) -> None:
    """And the weights, before the layer and in it, receive theirs through both branches."""
    model, x = build(variant), images(variant)
    target = torch.tensor([0, 3, 1])
    open_model = gated(deepcopy(model), attention_bypass=bypass)
    for number, site in enumerate(open_model.sites):
        for gate in (1.0, 0.0, 0.25):
            open_model.zero_grad()
            open_model.set_gate(site.name, gate)
            nn.functional.cross_entropy(open_model(x), target).backward()
            found = open_model.scores[number].grad
            scalar = torch.tensor(gate, dtype=torch.float64, requires_grad=True)
            with interpolated(model, site, bypass, scalar):
                loss = nn.functional.cross_entropy(model(x), target)
                expected, *weights = torch.autograd.grad(loss, [scalar, *model.parameters()])
            assert abs(expected) > 1e-8
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
            for parameter, gradient in zip(open_model.weight_parameters(), weights, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-14)
        open_model.set_gate(site.name, 1.0)


@pytest.mark.parametrize("gate", [1.0, 0.0])
def test_scores_in_float32_receive_the_same(gate: float) -> None:
    model, x = build("plain"), images("plain")
    found = []
    for dtype in (torch.float64, torch.float32):
        one = GatedModel(deepcopy(model), family_of(model), layers(model)).to(dtype)
        for site in one.sites:
            one.set_gate(site.name, gate)
        one(x.to(dtype)).square().sum().backward()
        found.append(torch.stack([score.grad for score in one.scores]).double())
    assert_moved(found[0], torch.zeros(4) + found[0].mean())
    assert difference(found[1], found[0]) < SAME * 2.0**29  # the bound of float64, at the roundoff of float32


@pytest.mark.parametrize("gate", [1.0, 0.0])
def test_score_gradients_agree_with_finite_differences(gate: float) -> None:
    """One-sided, of second order, into the range of gates: off by about h**2 f''' / 3, f''' far below 1e4."""
    model, x = build("plain"), images("plain")
    target, step = torch.tensor([0, 3, 1]), 1e-4 if gate == 0.0 else -1e-4
    open_model = gated(model)
    for number, site in enumerate(open_model.sites):
        losses = []
        for distance in (0, 1, 2):
            open_model.set_gate(site.name, gate + distance * step)
            with torch.no_grad():
                losses.append(float(nn.functional.cross_entropy(open_model(x), target)))
        slope = (-3 * losses[0] + 4 * losses[1] - losses[2]) / (2 * step)
        open_model.zero_grad()
        open_model.set_gate(site.name, gate)
        nn.functional.cross_entropy(open_model(x), target).backward()
        assert float(open_model.scores[number].grad) == pytest.approx(slope, abs=1e-4, rel=1e-4)
        assert abs(slope) > 1e-3
        open_model.set_gate(site.name, 1.0)


def test_scores_do_not_change_the_output_and_every_parameter_always_gets_a_gradient() -> None:
    model, x = build("plain"), images("plain")
    open_model = gated(model)
    before = logits(open_model, x)
    with torch.no_grad():
        for number, score in enumerate(open_model.score_parameters()):
            score.fill_(number - 1.5)
    assert torch.equal(logits(open_model, x), before)
    assert list(open_model.scores_of().values()) == [-1.5, -0.5, 0.5, 1.5]
    open_model.set_gate("blocks.0.attn", 0.0)
    open_model(x).sum().backward()
    assert all(p.grad is not None for p in open_model.parameters())
    assert float(model.blocks[0].attn.qkv.weight.grad.abs().max()) == 0.0
    assert float(model.blocks[1].attn.qkv.weight.grad.abs().max()) > 0.0


def test_saving_a_gated_model_keeps_scores_and_gates_apart_from_the_weights() -> None:
    model, x = build("plain"), images("plain")
    names = list(model.state_dict())
    one = gated(model)
    assert list(model.state_dict()) == names
    assert {f"model.{name}" for name in names} < set(one.state_dict())
    one.set_gate("blocks.1.mlp.act", 0.0)
    one.set_gate("blocks.0.attn", 0.5)
    with torch.no_grad():
        one.scores[2].fill_(3.0)
    other = gated(build("plain", seed=1))
    assert_moved(logits(other, x), logits(one, x))
    other.load_state_dict(one.state_dict(), strict=True)
    assert other.gate_values() == one.gate_values()
    assert other.scores_of() == one.scores_of()
    assert torch.equal(logits(other, x), logits(one, x))


@pytest.mark.parametrize("bypass", BYPASSES)
def test_a_deep_copy_has_gates_scores_and_hooks_of_its_own(bypass: str) -> None:
    model, x = build("plain"), images("plain")
    one = gated(model, attention_bypass=bypass, both_pruned_output_act="gelu")
    copy = deepcopy(one)
    before = logits(one, x)
    for site in copy.sites:
        copy.set_gate(site.name, 0.0)
    assert set(one.gate_values().values()) == {1.0}
    assert torch.equal(logits(one, x), before)
    assert_moved(logits(copy, x), before)
    copy(x).sum().backward()
    assert all(score.grad is None for score in one.scores)
    assert all(score.grad is not None for score in copy.scores)
    deployed = applied(
        build("plain"),
        depth_plan(
            build("plain"),
            contract("plain").plan,
            [0, 1],
            [0, 1],
            attention_bypass=bypass,
            both_pruned_output_act="gelu",
        ),
    )
    assert_same(logits(copy, x), logits(deployed, x))


def test_a_gated_model_takes_over_mode_and_names_without_weight_decay() -> None:
    model = build("distilled")
    one = GatedModel(model, family_of(model), layers(model))
    assert not one.training
    assert one.no_weight_decay() == {f"model.{name}" for name in model.no_weight_decay()} != set()
    assert {id(p) for p in one.parameters()} == {id(p) for p in (*one.score_parameters(), *one.weight_parameters())}
    assert len(one.score_parameters()) == 4


@pytest.mark.parametrize(
    ("modes", "told"),
    [
        (
            {"attention_bypass": "identity"},
            "attention_bypass must be one of drop, norm_identity, double, got 'identity'",
        ),
        ({"both_pruned_output_act": "relu"}, "both_pruned_output_act must be one of gelu, none; got 'relu'"),
    ],
)
def test_unknown_modes(modes: dict[str, str], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        gated(build("plain"), **modes)


def test_layers_without_a_gate() -> None:
    model = build("plain")
    sites = family_of(model).sites(model)
    for site in (sites[2], sites[3], Site("blocks.7.attn", "attention", "blocks.7", 7, "blocks.7.drop_path1")):
        with pytest.raises(PlanError, match=rf"no gate for {site.name}; layers that take one: blocks.0.attn"):
            GatedModel(model, family_of(model), [site])
    open_model = gated(model)
    with pytest.raises(PlanError, match=r"no gated layer blocks\.0\.mlp; gated: blocks\.0\.attn"):
        open_model.set_gate("blocks.0.mlp", 0.0)
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(PlanError, match=r"must lie in 0\.\.1"):
            open_model.set_gate("blocks.0.attn", value)


# ------------------------------------------------------------------------------------------------------- channel gates


def trace(model: nn.Module) -> list:
    """Everything that gates could leave behind."""
    hooks = [(n, type(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()]
    return [hooks, list(model.state_dict()), [(n, id(p)) for n, p in model.named_parameters()]]


@every_variant
def test_channel_gates_leave_no_trace(variant: str) -> None:
    model, x = build(variant), images(variant)
    before, expected = trace(model), logits(model, x)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept = kept_channels(model, {"qk", "v", "mlp", "residual"})
    with channel_gates(model, family_of(model), masks(model, kept)):
        assert trace(model) != before
        assert_moved(logits(model, x), expected)
    assert trace(model) == before
    assert torch.equal(logits(model, x), expected)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_channel_gates_leave_no_trace_of_a_failure() -> None:
    model = build("distilled")
    before = trace(model)
    gates = masks(model, kept_channels(model, {"mlp", "residual"}))
    with pytest.raises(KeyError), channel_gates(model, family_of(model), gates):
        raise KeyError
    assert trace(model) == before
    with channel_gates(model, family_of(model), gates):
        inside = trace(model)
        with (
            pytest.raises(PlanError, match="gated already"),
            channel_gates(model, family_of(model), {"residual": gates["residual"]}),
        ):
            pass
        assert trace(model) == inside
    assert trace(model) == before


@every_variant
def test_open_channel_gates_change_nothing_and_have_gradients(variant: str) -> None:
    """The derivative at 1 is the loss's first-order change when a channel goes (Taylor score): sum of w dL/dw."""
    model, x = build(variant), images(variant)
    expected = logits(model, x)
    gates = {
        name: torch.ones(space.size, dtype=torch.float64, requires_grad=True)
        for name, space in spaces_of(model).items()
    }
    with channel_gates(model, family_of(model), gates):
        out = model(x)
        out.square().sum().backward()
    assert_same(out.detach(), expected)
    name = f"{sites_of(model, 'block')[1].name}.mlp"
    mlp = model.get_submodule(name)
    rows = torch.zeros(mlp.fc2.in_features, dtype=torch.float64)  # a gated FFN has a gate and a value for each
    for writer in (mlp.fc1, mlp.dwconv) if hasattr(mlp, "dwconv") else (mlp.fc1,):
        rows += (writer.weight * writer.weight.grad).flatten(1).sum(1).view(-1, len(rows)).sum(0)
        rows += 0 if writer.bias is None else (writer.bias * writer.bias.grad).view(-1, len(rows)).sum(0)
    assert_same(gates[name].grad, rows.detach())
    assert all(float(gate.grad.abs().max()) > 0 for gate in gates.values())


def test_channel_gates_work_in_half_precision() -> None:
    model = build("layer_scale", dtype=torch.bfloat16)
    x = images("layer_scale", dtype=torch.bfloat16)
    gates = {name: gate.float() for name, gate in masks(model, kept_channels(model, {"qk", "v", "residual"})).items()}
    with channel_gates(model, family_of(model), gates):
        assert logits(model, x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("gates", "told"),
    [
        ({"blocks.0.kq": torch.ones(16)}, "no such space: blocks.0.kq"),
        ({"blocks.0.qk": torch.ones(15)}, r"blocks.0.qk has 16 channels, its gate has the shape \(15,\)"),
    ],
)
def test_gates_that_do_not_fit(gates: dict[str, Tensor], told: str) -> None:
    model = build("plain")
    with pytest.raises(PlanError, match=told), channel_gates(model, family_of(model), gates):
        pass
