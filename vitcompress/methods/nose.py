"""NOSE: choose attentions by greedy transfer entropy and fade them out during the recovery; the same for activations.

"MLP Can Be A Good Transformer Learner", https://arxiv.org/abs/2404.05657. Layers are chosen together on the frozen
model: in each round the one whose removal, together with all chosen before, has the lowest transfer entropy of the
logits. They then fade out during the recovery, with lambda from 1 to 0:

    x <- (2 - lambda) x + lambda * Attention(norm(x))      an attention becomes the identity, so the stream doubles
    h <- lambda * GELU(z) + (1 - lambda) * z               an activation (the activation-only baseline of HetDPT)

While transfer entropy is measured, a skipped attention is dropped (x <- x) as in the released code (`te_bypass`).
"""

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from vitcompress.families import Family, SiteKind
from vitcompress.methods import depth, transfer_entropy
from vitcompress.methods.base import Context, Estimate, Method, reject_unused
from vitcompress.methods.options import ActivationOptions
from vitcompress.methods.options import NoseOptions as Options


def dilute(options: ActivationOptions, epochs: int) -> Callable[[int], float]:
    """lambda in each epoch (from 0) of a recovery of `epochs`, also for evaluation: 1 - e/299 of 400 epochs, then 0.

    The last epoch is without the layers, as the deployed model is, even if it is the only one.
    """
    last = round(options.dilution * epochs) - 1
    if last > 0:
        return lambda epoch: max(0.0, 1.0 - epoch / last)
    return lambda epoch: float(epoch <= last and epoch < epochs - 1)


def _method(name: str, kind: SiteKind) -> Method:
    unused = "gated_ffn" if kind == "attention" else "attention_bypass"

    def unscored(model: nn.Module, family: Family, options: ActivationOptions) -> depth.Blocks:
        reject_unused(options, {unused: f"only {kind} layers are removed"})
        return depth.spread_layers(model, family, options, (kind,))

    def choose(model: nn.Module, context: Context, options: ActivationOptions) -> depth.Blocks:
        context.progress.stage(f"greedy transfer entropy of {kind} layers")
        sites = depth.layers(model, context.family)[kind]
        measured = replace(options, attention_bypass=options.te_bypass) if isinstance(options, Options) else options

        def measure() -> object:
            gated = depth.gate_layers(model, context, sites, measured)
            return transfer_entropy.greedy(gated, sites, options.pruned_layers, context, options.te)

        chosen = {table["chosen"] for table in context.memo("transfer_entropy", measure)}
        return depth.blocks_of(site for site in sites if site.name in chosen)

    def estimate(model: nn.Module, family: Family, options: ActivationOptions) -> list[Estimate]:
        """One measurement of the model and of each remaining candidate in each round."""
        candidates = len(depth.layers(model, family)[kind])
        measurements = sum(candidates + 1 - number for number in range(options.pruned_layers))
        return [Estimate("greedy transfer entropy", measurements, 1, images=options.te.images)]

    summary = f"{kind}s only: greedy transfer entropy; those of the last step fade out during the fine-tuning"
    return depth.depth_method(name, summary, choose, unscored, estimate=estimate, dilute=dilute)


NOSE = _method("nose", "attention")
ACTIVATION_ONLY = _method("activation_only", "activation")
