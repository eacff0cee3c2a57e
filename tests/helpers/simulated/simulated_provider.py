"""A simulated CUDA provider of ONNX Runtime: a session on the CPU that reports the GPU.

Like the real one, it binds only addresses "on the GPU".
"""

from types import SimpleNamespace
from typing import Any

import onnxruntime as ort

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
SESSION = ort.InferenceSession


class Binding:
    """Inputs and outputs by their addresses."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding

    def bind_input(self, name: str, device: str, index: int, kind: Any, shape: Any, address: int) -> None:
        assert (device, index) == ("cuda", 0)
        self.binding.bind_input(name, "cpu", 0, kind, tuple(shape), address)

    def bind_output(self, name: str, device: str, index: int, kind: Any, shape: Any, address: int) -> None:
        assert (device, index) == ("cuda", 0)
        self.binding.bind_output(name, "cpu", 0, kind, tuple(shape), address)


class OnGpu:
    """A session on the simulated GPU."""

    def __init__(self, path: str, options: Any, settings: dict[str, str], **how: Any) -> None:
        assert all(isinstance(value, str) for value in settings.values()), settings
        self.session = SESSION(path, options, providers=[CPU], **how)
        self.get_inputs, self.get_outputs = self.session.get_inputs, self.session.get_outputs

    def get_providers(self) -> list[str]:
        return [CUDA, CPU]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        parts = self.session.get_provider_graph_assignment_info()
        return [SimpleNamespace(ep_name=CUDA, get_nodes=part.get_nodes) for part in parts]

    def io_binding(self) -> Binding:
        return Binding(self.session.io_binding())

    def run(self, names: list[str], feed: dict[str, Any], options: Any = None) -> Any:
        return self.session.run(names, feed)

    def run_with_iobinding(self, bound: Binding, options: Any = None) -> None:
        self.session.run_with_iobinding(bound.binding)


def session(path: str, options: Any = None, providers: Any = None, **how: Any) -> Any:
    name, settings = providers[0] if providers and isinstance(providers[0], tuple) else (CPU, {})
    if name == CUDA:
        return OnGpu(path, options, settings, **how)
    return SESSION(path, options, providers=providers, **how)


def install() -> None:
    ort.InferenceSession = session
