"""A simulated GPU: its tensors are in the memory of the host and only report cuda:0.

It rejects what torch rejects on a GPU: tensors of two devices in one operation, NumPy on a tensor of the GPU, a
generator of the other device. So code for GPUs can be tested without one. This checks the placement of tensors, not
kernels, speed or memory.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from simulated_queue import GPU, Event, Graph, Recording, Stream, wait
from torch import Tensor
from torch.overrides import TorchFunctionMode

MIXED = "Expected all tensors to be on the same device"
# Functions that accept tensors of both devices.
CROSSING = ("copy_", "set_", "_has_compatible_shallow_copy_type", "is_same_size")
GENERATOR, AUTOCAST, MAKE_SUBCLASS = torch.Generator, torch.autocast, torch.Tensor._make_subclass
PARSE_TO: Callable[..., Any] = torch._C._nn._parse_to  # type: ignore[attr-defined]


def is_on_gpu(tensor: Tensor) -> bool:
    return bool(tensor.__dict__.get("on_gpu", False))


def put(tensor: Tensor, on_gpu: bool) -> Tensor:
    tensor.__dict__["on_gpu"] = on_gpu
    return tensor


def names_gpu(device: Any) -> bool:
    return isinstance(device, int) or torch.device(device).type == "cuda"


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in lists, tuples and dictionaries. Called for every operation: torch's own trees take much longer."""
    if isinstance(tree, Tensor):
        return [tree]
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for one in inner for tensor in tensors_in(one)]


class Devices(TorchFunctionMode):
    """Tracks the simulated device of every tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, dict(kwargs or {})
        if name == "__get__":
            return _attribute(func, args, kwargs)
        if name == "__set__":
            return _assign(func, args, kwargs)
        special = SPECIAL.get(name)
        return special(func, args, kwargs) if special else _compute(func, name, args, kwargs)


def _attribute(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, of = args[0], func.__self__.__name__
    if of in ("device", "is_cuda", "is_cpu") and is_on_gpu(tensor):
        return {"device": GPU, "is_cuda": True, "is_cpu": False}[of]
    result = func(*args, **kwargs)
    if isinstance(result, Tensor) and result is not tensor:
        put(result, is_on_gpu(tensor))
    return result


def _assign(func: Any, args: Any, kwargs: Any) -> None:
    tensor, value = args[:2]
    func(*args, **kwargs)
    if func.__self__.__name__ == "data":
        put(tensor, is_on_gpu(value))
    elif isinstance(value, Tensor) and is_on_gpu(value) != is_on_gpu(tensor):
        raise RuntimeError(f"{MIXED}: {func.__self__.__name__} of a tensor on the other one")


def _to(func: Any, args: Any, kwargs: Any) -> Tensor:
    """`Tensor.to` in all its forms."""
    tensor, *rest = args
    device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
    other = kwargs.pop("other", None)
    if rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
    if rest and (rest[0] is None or isinstance(rest[0], str | torch.device | int)) and rest[0] is not False:
        device = rest.pop(0) or device
    if rest and isinstance(rest[0], torch.dtype):
        dtype = rest.pop(0)
    if other is not None:
        device, dtype = "cuda" if is_on_gpu(other) else other.device, other.dtype
    if device is not None and torch.device(device).type == "meta":
        return func(tensor, device)  # type: ignore[no-any-return]
    there = is_on_gpu(tensor) if device is None else names_gpu(device)
    copy = kwargs.get("copy", False) or there != is_on_gpu(tensor)
    moved = func(tensor, dtype or tensor.dtype, copy=copy)
    return moved if moved is tensor else put(moved, there)


def _to_numpy(func: Any, args: Any, kwargs: Any) -> Any:
    if is_on_gpu(args[0]):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
    return func(*args, **kwargs)


def _hooked(func: Any, args: Any, kwargs: Any) -> Any:
    """`Tensor.register_hook`: the gradient that a hook receives is on the device of its tensor."""
    tensor, hook = args

    def placed(gradient: Tensor) -> Any:
        result = hook(put(gradient, is_on_gpu(tensor)))
        if result is not None and is_on_gpu(result) != is_on_gpu(tensor):
            raise RuntimeError(f"{MIXED}: a hook returns a gradient on the other one")
        return result

    return func(tensor, placed)


def _page_locked(func: Any, args: Any, kwargs: Any) -> Tensor:
    if is_on_gpu(args[0]):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    return args[0].clone()  # type: ignore[no-any-return]


SPECIAL: dict[str, Callable[[Any, Any, Any], Any]] = {
    "to": _to,
    "cpu": lambda func, args, kwargs: put(args[0].clone(), False) if is_on_gpu(args[0]) else args[0],
    "cuda": lambda func, args, kwargs: put(args[0].clone(), True),
    "get_device": lambda func, args, kwargs: 0 if is_on_gpu(args[0]) else -1,
    "numpy": _to_numpy,
    "__array__": _to_numpy,
    "register_hook": _hooked,
    "pin_memory": _page_locked,
    "is_pinned": lambda func, args, kwargs: False,
}


def _compute(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Any other function: its results are on the requested device, or on that of its tensors."""
    device = kwargs.get("device")
    wanted = None if device is None else names_gpu(device)
    kwargs |= {"device": "cpu"} if wanted else {}
    kwargs |= {"pin_memory": False} if "pin_memory" in kwargs else {}
    inputs = tensors_in((args, kwargs))
    if wanted is None and name not in CROSSING:
        _check_together(name, args, inputs)
    there = any(map(is_on_gpu, inputs)) if wanted is None else wanted
    if kwargs.get("generator") is not None and getattr(kwargs["generator"], "on_gpu", False) != there:
        raise RuntimeError(f"Expected a '{'cuda' if there else 'cpu'}' device type for generator, got the other")
    result = func(*args, **kwargs)
    for tensor in tensors_in(result):
        if all(tensor is not one for one in inputs):
            put(tensor, there)
    if wanted and isinstance(result, Tensor) and not is_on_gpu(result):
        return put(result.clone(), True)  # as_tensor returns its argument
    return result


def _check_together(name: str, args: Any, inputs: list[Tensor]) -> None:
    """Raise like torch: only single numbers and indices may be on the host beside tensors on a GPU."""
    if name == "__setitem__" and not tensors_in(args[1]):
        return  # a copy
    first_on_gpu = is_on_gpu(args[0]) if args and isinstance(args[0], Tensor) else True
    off = [tensor for tensor in inputs if not is_on_gpu(tensor) and tensor.device.type != "meta"]
    if not off or not any(map(is_on_gpu, inputs)):
        return
    indices = tensors_in(args[1]) if name in ("__getitem__", "__setitem__") and first_on_gpu else []
    apart = [one for one in off if one.dim() and all(one is not index for index in indices)]
    changed = (name.endswith("_") and not name.endswith("__")) or name in ("__getitem__", "__setitem__")
    if apart or (changed and not first_on_gpu):
        shapes = ", ".join(f"{tuple(one.shape)} {'cuda:0' if is_on_gpu(one) else 'cpu'}" for one in inputs)
        raise RuntimeError(f"{MIXED}: {name} of {shapes}")


class Generator(GENERATOR):
    """A generator with a simulated device."""

    on_gpu = False

    def __new__(cls, device: Any = "cpu") -> "Generator":
        generator = GENERATOR.__new__(cls, "cpu")
        generator.on_gpu = names_gpu(device)
        return generator

    def __init__(self, device: Any = "cpu") -> None:
        """The device is set already."""

    @property
    def device(self) -> torch.device:
        return GPU if self.on_gpu else torch.device("cpu")


class Autocast(AUTOCAST):
    """Mixed precision on the GPU, computed on the CPU."""

    def __init__(self, device_type: str, dtype: Any = None, **settings: Any) -> None:
        on_gpu = device_type == "cuda"
        dtype = dtype or (torch.float16 if on_gpu else None)
        super().__init__("cpu" if on_gpu else device_type, dtype=dtype, **settings)


def _parameter(*args: Any, **kwargs: Any) -> Tensor:
    """Creates a parameter from a tensor, the second argument; function modes do not see this call."""
    return put(MAKE_SUBCLASS(*args, **kwargs), is_on_gpu(args[1]))


def _parse_to(*args: Any, **kwargs: Any) -> Any:
    """The arguments of `Module.to`; function modes do not see this call."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    return PARSE_TO(*args, **kwargs)


def install() -> None:
    """Simulate a GPU in this process from now on."""
    about = SimpleNamespace(
        name="simulated GPU", uuid="simulated", total_memory=2**36, major=9, minor=0, multi_processor_count=132
    )
    state = torch.zeros(16, dtype=torch.uint8)
    results = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        **dict.fromkeys(("max_memory_allocated", "memory_allocated", "max_memory_reserved"), 2**20),
        **dict.fromkeys(("init", "set_device", "reset_peak_memory_stats", "empty_cache")),
        **dict.fromkeys(("manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all")),
        "is_current_stream_capturing": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": about.name,
        "get_device_capability": (about.major, about.minor),
        "get_device_properties": about,
        "mem_get_info": (2**35, 2**36),
        "get_rng_state": state,
        "get_rng_state_all": [state],
    }
    for name, result in results.items():
        setattr(torch.cuda, name, lambda *args, result=result, **kwargs: result)
    for name, replacement in {
        "synchronize": wait,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": Recording,
    }.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.stream = lambda stream=None: stream or Stream()  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *args, **kwargs: Stream()  # type: ignore[assignment]
    torch.Tensor._make_subclass = staticmethod(_parameter)  # type: ignore[method-assign]
    torch._C._nn._parse_to = _parse_to  # type: ignore[attr-defined]
    torch.Generator = Generator  # type: ignore[misc]
    torch.autocast = torch.amp.autocast = Autocast  # type: ignore[misc,assignment]
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None  # type: ignore[method-assign]
    Devices().__enter__()
