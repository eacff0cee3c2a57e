"""A cheap estimate of S(c): the curvature of KL at the model as it is. Always called a screen, never the score.

With a gate g_c on each channel, KL(softmax(z) || softmax(z(g))) and its gradient are zero at g = 1, so that up to
second order (Gauss-Newton) taking a channel away costs

    S(c) ~ 1/2 sum over images of j_c^T F j_c,    j_c = dz / dg_c,   F = diag(q) - q q^T (Fisher information of softmax)

F = B B^T with B = diag(sqrt q) - q sqrt(q)^T. For orthonormal v_1 .. v_k and random signs e, whose part along them is
taken away to leave e', j^T F j is the sum of (j^T B v_i)^2 and the mean of (j^T B e')^2, whatever the v_i are (as in
Hutch++, https://arxiv.org/abs/2010.09649). With the v_i that B stretches most, little is left to chance: few classes
share almost all of an image's q. So a few backward passes do for all channels of all components together.

An attention's channel is one of q, one of k and one of v. What it adds to q k is a product, from which a gate on both
would take twice as much as its deletion does; the gates of q and k are the root of the channel's.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from vitcompress.loaders import EvalLoader
from vitcompress.methods.upvit.deletion import deletion
from vitcompress.methods.upvit.importance import Component

ROUNDS = 8  # of the iteration that finds the v_i; the estimate is right on average after any number


def estimates(
    model: nn.Module, components: Sequence[Component], loader: EvalLoader, *, directions: int, seed: int
) -> dict[str, Tensor]:
    """The estimate for each channel of each component over this process's share of `loader`: (channels,), float64.

    directions: backward passes per image, the last of which goes along random signs and the others along the v_i; as
    many as there are classes make the estimate exact.
    """
    parameter = next(model.parameters())
    total = {c.name: torch.zeros(c.size, dtype=torch.float64) for c in components}
    spaces = [space for component in components for space in component.spaces]
    drawn = torch.Generator().manual_seed(seed)
    for batch, _ in loader:
        images = batch.to(parameter.dtype)
        gates = {c.name: images.new_ones(len(images), c.size).requires_grad_() for c in components}
        by_space = {
            s.name: gates[c.name].sqrt() if s.kind == "qk" else gates[c.name] for c in components for s in c.spaces
        }
        with torch.enable_grad(), deletion(model.eval(), spaces, by_space):
            logits = model(images)
        for direction in _directions(logits.detach(), directions, drawn):
            found = torch.autograd.grad(logits, list(gates.values()), direction, retain_graph=True)
            for name, gradient in zip(gates, found, strict=True):
                total[name] += gradient.double().square().sum(dim=0).cpu() / 2
    return total


def _directions(logits: Tensor, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """`count` times B v, (images, classes): the squares of j^T (B v) add up to an unbiased estimate of j^T F j."""
    q = torch.softmax(logits.double(), dim=-1).cpu().unsqueeze(-1)
    root = q.sqrt()
    leading = _leading(q, min(count, q.shape[1]) - 1, generator)
    signs = torch.randint(0, 2, q.shape, generator=generator).to(q.dtype) * 2 - 1
    rest = signs - leading @ (leading.mT @ signs)
    for direction in _times(q, root, torch.cat([leading, rest], dim=-1)).unbind(dim=-1):
        yield direction.to(logits)


def _times(q: Tensor, root: Tensor, v: Tensor) -> Tensor:
    """B v, for columns v: (images, classes, columns)."""
    return root * v - q * (root * v).sum(dim=1, keepdim=True)


def _leading(q: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Orthonormal columns that B stretches most, by orthogonal iteration: (images, classes, count)."""
    root = q.sqrt()
    v = torch.randn(*q.shape[:2], count, generator=generator, dtype=q.dtype)
    for _ in range(ROUNDS if count else 0):
        out = _times(q, root, v)
        v = torch.linalg.qr(root * (out - (q * out).sum(dim=1, keepdim=True)))[0]
    return v
