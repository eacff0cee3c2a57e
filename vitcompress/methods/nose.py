"""NOSE: remove attentions by greedy transfer entropy, diluting them over the recovery; and the same for activations.

"MLP Can Be A Good Transformer Learner", https://arxiv.org/abs/2404.05657. Layers are chosen together on the frozen
model: repeatedly the one whose removal, with all chosen before, has the lowest transfer entropy towards the logits.
Then they fade out while training: with lambda from 1 to 0,

    x <- (2 - lambda) x + lambda * Attention(norm(x))      an attention becomes the identity, so the stream doubles
    h <- lambda * GELU(z) + (1 - lambda) * z               an activation (the activation-only baseline of HetDPT)

While measuring, a skipped attention is dropped (x <- x), as the authors did; `te_bypass` measures otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from annotated_types import Gt, Le
from torch import nn

from vitcompress.families import Family
from vitcompress.io.validation import Doc
from vitcompress.methods import depth, transfer_entropy
from vitcompress.methods.base import MEASURED_LAYERS, Context, Estimate, Method, StepInfo
from vitcompress.methods.depth import Bypass, DepthOptions, Kind
from vitcompress.methods.hetdpt import report
from vitcompress.methods.transfer_entropy import EntropyOptions, Measurement
from vitcompress.plan import Plan


@dataclass(frozen=True, kw_only=True)
class ActivationOptions(DepthOptions):
    """Options for activations."""

    dilution: Annotated[
        float, Gt(0), Le(1), Doc("share of the recovery until the layers are gone (NOSE: 300 of 400 epochs)")
    ] = 0.75
    te: EntropyOptions = field(default_factory=EntropyOptions)


@dataclass(frozen=True, kw_only=True)
class Options(ActivationOptions):
    """Options for attentions; NOSE itself replaces an attention by doubling the residual stream."""

    attention_bypass: Bypass = "double"
    te_bypass: Annotated[Bypass, Doc("replacement while transfer entropy is measured")] = "drop"


def plan(model: nn.Module, context: Context, options: Options) -> Plan:
    """The attentions with the lowest transfer entropy, chosen greedily."""
    return _greedy(model, context, options, "attention", options.te_bypass)


def plan_activations(model: nn.Module, context: Context, options: ActivationOptions) -> Plan:
    """The activations with the lowest transfer entropy, chosen greedily: NOSE applied to activations."""
    return _greedy(model, context, options, "activation", options.attention_bypass)


def structure(model: nn.Module, family: Family, base: Plan, options: Options) -> Plan:
    """As many attentions, picked by position. Raises PlanError when there are too few."""
    return depth.delta(model, base, depth.any_layers(model, family, options.pruned_layers, ("attention",)), options)


def structure_activations(model: nn.Module, family: Family, base: Plan, options: ActivationOptions) -> Plan:
    """As many activations, picked by position. Raises PlanError when there are too few."""
    return depth.delta(model, base, depth.any_layers(model, family, options.pruned_layers, ("activation",)), options)


def dilute(options: ActivationOptions, epochs: int) -> Callable[[int], float]:
    """lambda at each epoch (from 0) of a recovery of `epochs`: 1 - e/299 of 400 epochs, then 0; used for evaluation
    too. The last epoch is without the layers, as the deployed model is, even where it is the only one.
    """
    last = round(options.dilution * epochs) - 1

    def strength(epoch: int) -> float:
        if last > 0:
            return max(0.0, 1.0 - epoch / last)
        return float(epoch <= last and epoch < epochs - 1)

    return strength


def _estimate(kind: Kind, model: nn.Module, family: Family, options: ActivationOptions) -> list[Estimate]:
    """One measurement of the model and of each candidate that is left, in each round."""
    candidates = len(depth.layers(model, family)[kind])
    measurements = sum(candidates + 1 - number for number in range(options.pruned_layers))
    return [Estimate("greedy transfer entropy", measurements, 1, images=options.te.images)]


def _greedy(model: nn.Module, context: Context, options: ActivationOptions, kind: Kind, bypass: Bypass) -> Plan:
    depth.any_layers(model, context.family, options.pruned_layers, (kind,))
    context.progress.stage(f"greedy transfer entropy of {kind} layers")
    sites = depth.layers(model, context.family)[kind]

    def select() -> list[dict[str, Any]]:
        open_model = depth.gated(model, context, sites, options, bypass)
        on = Measurement.of(context, options.te)
        return transfer_entropy.greedy(open_model, sites, options.pruned_layers, on)

    chosen = {table["chosen"] for table in context.memo("transfer_entropy", select)}
    return depth.decided(
        model, context, {kind: [site.index for site in sites if site.name in chosen]}, options, fades=True
    )


NOSE = Method(
    "nose",
    "attentions only: greedy transfer entropy, faded out while recovering",
    options=Options,
    plan=plan,
    structure=structure,
    estimate=partial(_estimate, "attention"),
    describe=lambda options: StepInfo(MEASURED_LAYERS),
    dilute=dilute,
    report=report.report,
)


ACTIVATION_ONLY = Method(
    "activation_only",
    "activations only: greedy transfer entropy, faded out while recovering",
    options=ActivationOptions,
    plan=plan_activations,
    structure=structure_activations,
    estimate=partial(_estimate, "activation"),
    describe=lambda options: StepInfo(MEASURED_LAYERS),
    dilute=dilute,
    report=report.report,
)
