"""Parameters and multiply-accumulates of a model, counted by torch on the meta device."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from vitcompress.families import copy_model, unwrap
from vitcompress.models.create import Side, SkipOnMeta, check_images, image_size, input_config

TRACING = Lock()  # torch traces models, and computes on the meta device under a counter, in one thread at a time
FREE = {"layer_norm", "gelu", "softmax", "dropout"}  # without products, and their output has the shape of the input


@dataclass(frozen=True)
class Cost:
    """Number of parameters, and multiply-accumulates of one forward pass of one image.

    macs: with both matrix products of each attention. macs_linear: without them, as the pruned rows in HetDPT's tables.
    """

    params: int
    macs: int
    macs_linear: int


def count_cost(model: nn.Module, input_size: tuple[Side, ...] | list[Side] | None = None) -> Cost:
    """The cost of `model` for one image of `input_size` (channels, height, width); default: the model's own size.

    Example:
        >>> import vitcompress as vc
        >>> vc.count_cost(vc.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=10))
        Cost(params=595978, macs=2813184, macs_linear=2803584)
    """
    if input_size is not None:
        check_images(torch.empty(1, *input_size, device="meta"), image_size(unwrap(model)))
    return _cost(model, count_flops(model, tuple(input_size or input_config(model).size))["Global"])


def count_flops(model: nn.Module, input_size: tuple[int, ...]) -> dict[str, dict[Any, int]]:
    """Floating point operations by module (`VisionTransformer.blocks.0.attn`) and operator."""
    tensors = (*model.parameters(), *model.buffers())
    ready = not model.training and all(tensor.is_meta and not tensor.requires_grad for tensor in tensors)
    shapes = model if ready else copy_to_meta(model)  # no copy for the many candidates of a search
    dtype = next((p.dtype for p in shapes.parameters()), torch.float32)
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _Tracker(shapes)
    with TRACING, torch.no_grad(), SkipOnMeta(FREE), counter:
        shapes(torch.empty(1, *input_size, device="meta", dtype=dtype))
    return dict(counter.get_flop_counts())


class _Tracker(ModuleTracker):
    """Tracks the modules of `model` alone: torch's hooks also see those that other threads call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._own = set(model.modules())

    def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:
        if mod in self._own:
            super()._fw_pre_hook(mod, input)

    def _fw_post_hook(self, mod: nn.Module, input: Any, output: Any) -> None:
        if mod in self._own:
            super()._fw_post_hook(mod, input, output)


def count_by_module(model: nn.Module, input_size: tuple[int, int, int]) -> dict[str, Cost]:
    """Module, such as `blocks.0.attn` -> its cost, of all modules that compute products."""
    modules, root = dict(model.named_modules()), type(model).__name__
    flops = {path.removeprefix(root).lstrip("."): work for path, work in count_flops(model, input_size).items()}
    return {path: _cost(modules[path], work) for path, work in flops.items() if path in modules}


def copy_to_meta(model: nn.Module) -> nn.Module:
    """A copy on the meta device, in eval mode and without hooks, which may read values or store what they receive.

    Its parameters require no gradients: under `torch.no_grad` a view of a parameter, such as a pool's expanded latent,
    still does, but has no gradient function, which torch's ModuleTracker expects of a module's input.
    """
    model = unwrap(model)
    copied: dict[int, Any] = {id(buffer): buffer.detach().to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        copied[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    hooks = (hooks for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks))
    return copy_model(model, copied | {id(one): OrderedDict() for one in hooks}).eval()


def _cost(module: nn.Module, flops: Mapping[Any, int]) -> Cost:
    macs = {str(operator).split(".")[-1]: count // 2 for operator, count in flops.items()}
    linear = sum(macs.get(name, 0) for name in ("convolution", "addmm", "mm"))
    return Cost(sum(p.numel() for p in module.parameters()), sum(macs.values()), linear)
