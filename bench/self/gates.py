"""Time of a training step of a gated model over that of the plain timm model."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress.bench import timing
from vitcompress.bench.artifacts import synthetic_images
from vitcompress.bench.self.parts import Options, line
from vitcompress.families import family_of
from vitcompress.models.create import create_model, input_config
from vitcompress.surgery.gates import GatedModel
from vitcompress.surgery.masks import mask_channels

AIMS = {"channel gates": (0.0, 1.05), "score search": (0.0, 1.12)}
BYPASS: dict[str, Any] = {"attention_bypass": "norm_identity", "both_pruned_output_act": "gelu"}  # released HetDPT code


def run(options: Options) -> Iterator[dict[str, Any]]:
    """Training steps of the plain model, of one with every channel gated, and of one in the score search, in turns."""
    plain, widths, searched = (create_model(options.arch).train() for _ in range(3))
    family = family_of(widths)
    values = {space.name: torch.ones(space.size) for space in family.spaces(widths) if space.kind != "residual"}
    sites = [site for site in family.sites(searched) if site.kind in ("attention", "activation")]
    search = GatedModel(searched, family, sites, **BYPASS)
    images = synthetic_images(input_config(plain).size, options.batch, 0)
    with mask_channels(widths, family, values):
        named = {"plain": plain, "channel gates": widths, "score search": search}
        targets = [timing.Target(name, _training_step(model, images)) for name, model in named.items()]
        samples = timing.measure(targets, timing.Protocol("steps", options.batch, warmup=2, runs=options.runs))
    for gated in samples[1:]:
        yield line(gated.name, gated, samples[0], AIMS[gated.name])


def _training_step(model: nn.Module, images: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    targets = torch.zeros(len(images), dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        answers = model(images)
        logits = torch.stack(answers).mean(0) if isinstance(answers, tuple) else answers  # two heads in training
        loss: Any = nn.functional.cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()

    return step
