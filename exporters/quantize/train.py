"""Quantisation-aware training: a model that rounds while it trains, as its exported file will."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress.exporters.quantize.emulate import EightBitProducts
from vitcompress.exporters.quantize.graph import Quantization


class QuantizedTraining(nn.Module):
    """`model`, whose linear layers multiply in eight bits as `settings` states.

    Gradients pass the rounding unchanged (straight-through, Bengio et al., 2013, https://arxiv.org/abs/1308.3432).
    learned: the ranges are trained, too (LSQ, Esser et al., 2020, https://arxiv.org/abs/1902.08153, eq. 3), in
    logarithms, so that they stay positive.
    """

    def __init__(self, model: nn.Module, settings: Quantization, *, learned: bool) -> None:
        super().__init__()
        self.model, self.settings = model, settings
        ranges = torch.tensor(list(settings.ranges.values()))
        self.log_ranges = nn.Parameter(ranges.clamp(min=torch.finfo().tiny).log(), requires_grad=learned)

    def ranges(self) -> dict[str, Tensor]:
        """Layer -> largest magnitude of its input."""
        return dict(zip(self.settings.ranges, self.log_ranges.exp(), strict=True))

    def forward(self, x: Tensor) -> Any:
        """x: images, (batch, C, H, W) -> logits of `model`. Never in half precision, which files do not compute in."""
        ranges: Any = self.ranges()  # tensors, so that they are trained
        settings = replace(self.settings, ranges=ranges)
        with torch.autocast(x.device.type, enabled=False), EightBitProducts(self.model, settings):
            return self.model(x)
