"""A cheap estimate of S(c): the curvature of KL at the model as it is. Always called a screen, never the score.

With a gate g_c on each channel, KL(softmax(z) || softmax(z(g))) and its gradient are zero at g = 1, so that up to
second order (Gauss-Newton) taking a channel away costs

    S(c) ~ 1/2 sum over images of j_c^T F j_c,    j_c = dz / dg_c,   F = diag(q) - q q^T (Fisher information of softmax)

F = B B^T with B = diag(sqrt q) - q sqrt(q)^T, and for random signs e the mean of (j_c^T B e)^2 is j_c^T F j_c: a few
backward passes give the estimate for all channels of all components together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitcompress.loaders import EvalLoader
from vitcompress.methods.upvit.deletion import deletion
from vitcompress.methods.upvit.importance import Component


def estimates(
    model: nn.Module, components: Sequence[Component], loader: EvalLoader, *, draws: int, seed: int
) -> dict[str, Tensor]:
    """The estimate for each channel of each component over this process's share of `loader`: (channels,), float64.

    draws: random sign vectors per image.
    """
    parameter = next(model.parameters())
    total = {c.name: torch.zeros(c.size, dtype=torch.float64) for c in components}
    spaces = [space for component in components for space in component.spaces]
    signs = torch.Generator().manual_seed(seed)
    for batch, _ in loader:
        images = batch.to(parameter.dtype)
        gates = {c.name: images.new_ones(len(images), c.size).requires_grad_() for c in components}
        by_space = {space.name: gates[c.name] for c in components for space in c.spaces}
        with torch.enable_grad(), deletion(model.eval(), spaces, by_space):
            logits = model(images)
        for draw in range(draws):
            directions = _directions(logits.detach(), signs)
            wanted = list(gates.values())
            found = torch.autograd.grad(logits, wanted, directions, retain_graph=draw + 1 < draws)
            for name, gradient in zip(gates, found, strict=True):
                total[name] += gradient.double().square().sum(dim=0).cpu() / (2 * draws)
    return total


def _directions(logits: Tensor, generator: torch.Generator) -> Tensor:
    """B e for random signs e: (images, classes)."""
    q = torch.softmax(logits.double(), dim=-1)
    signs = torch.randint(0, 2, q.shape, generator=generator).to(q.device, q.dtype) * 2 - 1
    root = q.sqrt() * signs
    return (root - q * root.sum(dim=-1, keepdim=True)).to(logits.dtype)
