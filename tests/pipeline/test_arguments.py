"""The arguments of all public functions: wrong ones end in one InputError, and right ones are passed on unchanged."""

import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import vitcompress as vc
from vitcompress.errors import DeviceError, InputError
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runner import RunnerOptions
from vitcompress.io.progress import Progress
from vitcompress.io.validation import options_of

ARGS: dict[str, Any] = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}
MODEL = vc.create_model("vit_tiny_patch16_224", **ARGS)
BATCHES = [(torch.zeros(2, 1, 8, 8), torch.arange(2))]
FUNCTIONS = [name for name in vc.__all__ if inspect.isfunction(getattr(vc, name))]
# Arguments that let a call start.
FIRST: dict[str, tuple[Any, ...]] = {
    "create_model": ("vit_tiny_patch16_224",),
    "evaluate": (MODEL, BATCHES),
    "export": (MODEL, "model.onnx"),
    "finetune": (MODEL, BATCHES),
    "prune": (MODEL, vc.Plan("vit_tiny_patch16_224")),
    **dict.fromkeys(("bench", "count_cost", "fold", "plan"), (MODEL,)),
    "save_model": (MODEL, "saved"),
    **dict.fromkeys(("load_model", "verify"), ("saved",)),
    **dict.fromkeys(("load_recipe", "run_recipe"), ("digits_hetdpt",)),
}


class Other:
    """An object of no type that a parameter has."""


WRONG = (Other(), Other, lambda: 0, 1.5, b"a", [Other()], {1: 2}, torch.zeros(2, 2), np.zeros(3), iter(()))


def named(function: str) -> Iterator[str]:
    """The parameters of a public function whose types are checked."""
    parameters = inspect.signature(getattr(vc, function)).parameters.values()
    return (p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.annotation is not Any)


def call(function: str, **changes: Any) -> Any:
    """Call a public function with `FIRST` and `changes`."""
    arguments = inspect.signature(getattr(vc, function)).bind_partial(*FIRST[function]).arguments
    return getattr(vc, function)(**{**arguments, **changes})


@pytest.mark.parametrize(("function", "name"), [(function, name) for function in FUNCTIONS for name in named(function)])
def test_values_of_no_allowed_type_are_rejected(
    function: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    default = inspect.signature(getattr(vc, function)).parameters[name].default
    start = rf"the arguments of {function} are invalid:\n  {name}\b.*   got "
    for wrong in (*WRONG, *([] if default is None else [None])):
        with pytest.raises(InputError, match=start) as error:
            call(function, **{name: wrong})
        assert error.value.hint == f"help(vitcompress.{function}) describes all of them"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        ("run_recipe", {"data": BATCHES}, "data   got [(tensor("),
        ("run_recipe", {"options": {}}, "options   got {}, expected a RunOptions"),
        ("verify", {"folder": None}, "folder   got None, expected text or a Path"),
        ("verify", {"folder": MODEL}, "folder   got a value of type VisionTransformer, expected text or a Path"),
        ("evaluate", {"workers": -1}, "workers   got -1, expected 0 or more"),
        ("finetune", {"workers": np.int64(-1)}, "workers   got -1, expected 0 or more"),
        ("finetune", {"amp": "fp8"}, "amp   got 'fp8', expected one of none, fp16, bf16"),
        ("plan", {"device": 3}, "device   got 3, expected text or a device"),
        ("plan", {"seed": "a"}, "seed   got 'a', expected a whole number"),
        ("plan", {"seed": True}, "seed   got true, expected a whole number"),
        (
            "plan",
            {"seed": -1, "device": None},
            "  device   got None, expected text or a device\n  seed     got -1",
        ),
        ("plan", {"progress": Progress}, "progress   got a value of type type, expected a Progress"),
        ("fold", {"model": "run"}, "model   got 'run', expected a model, as of vc.create_model or vc.load_model"),
        ("export", {"class_names": "abcd"}, "class_names   got 'abcd', expected a list"),
        ("export", {"class_names": ["a", 3]}, "class_names.1   got 3, expected text"),
        ("save_model", {"classes": "abcd"}, "classes   got 'abcd', expected a list"),
        ("bench", {"batch": ()}, "batch   got [], expected a whole number or a list of 1 or more"),
        ("bench", {"artifacts": [MODEL, 3]}, "artifacts.1   got 3, expected a model, as of vc.create_model"),
        ("bench", {"fail_under": -1.0}, "fail_under   got -1.0, expected more than 0"),
        ("bench", {"threads": 0}, "threads   got 0, expected 1 or more"),
        ("plan", {"seed": 2**64}, "seed   got 18446744073709551616, expected 9223372036854775807 or less"),
        ("finetune", {"learning_rate": 0.1}, "learning_rate   unknown key, did you mean lr?"),
        ("finetune", {"wd": 0.1}, "wd   unknown key, did you mean weight_decay?"),
        ("count_cost", {"input_size": [1, -8, 8]}, "input_size.1   got -8, expected 1 or more"),
        ("plan", {"folder": "a\0b"}, "the path a\\x00b contains a NUL character"),
        ("evaluate", {"data": {1: 2}}, "a batch is int instead of two tensors"),
    ],
)
def test_errors_state_the_value_and_what_is_allowed(function: str, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=re.escape(text)):
        call(function, **arguments)


def test_numbers_of_numpy_and_devices_of_torch_are_accepted(tmp_path: Path) -> None:
    one, eight = np.int64(1), np.int32(8)
    assert call("count_cost", input_size=(one, eight, eight)) == call("count_cost", input_size=[1, 8, 8])
    assert vc.plan(MODEL, "magnitude", seed=one, device=torch.device("cpu"), folder=tmp_path / "plan").heads  # type: ignore[arg-type]
    vc.save_model(MODEL, str(tmp_path / "saved"))
    for device in ("auto", "cpu", torch.device("cpu")):
        assert isinstance(vc.load_model(tmp_path / "saved", device), nn.Module)
    with pytest.raises(DeviceError, match="'gpu' is unknown"):
        vc.load_model(tmp_path / "saved", "gpu")


def test_objects_are_passed_on_as_they_are() -> None:
    class Data:
        """Its images are read once, by the function."""

        passes = 0

        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            return iter(BATCHES)

    data, batches = Data(), iter(BATCHES)
    assert vc.evaluate(MODEL, data).total == vc.evaluate(MODEL, batches).total == 2
    assert data.passes == 1
    assert vc.prune(MODEL, vc.Plan(MODEL.plan.arch, MODEL.plan.arch_args)).plan == MODEL.plan  # type: ignore[union-attr]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_keep_signature_and_documentation(function: str) -> None:
    public = getattr(vc, function)
    inner = inspect.unwrap(public)
    assert public is getattr(vc, function) is pickle.loads(pickle.dumps(public))  # noqa: S301
    shown, own = inspect.signature(public).parameters, inspect.signature(inner).parameters
    assert {name: (p.kind, p.default) for name, p in shown.items()} == {n: (p.kind, p.default) for n, p in own.items()}
    assert public.__doc__ == inner.__doc__ and "Validator" not in str(inspect.signature(public))
    about = rf"^{function}: {{}}; help\(vitcompress\.{function}\) describes its arguments$"
    with pytest.raises(TypeError, match=about.format("missing a required argument: .*")):
        public()
    with pytest.raises(TypeError, match=about.format("too many positional arguments")):
        public(*[None] * (len(shown) + 1))


@pytest.mark.parametrize(("options", "name"), [(ExportOptions, "timing_cache"), (RunnerOptions, "engine_cache")])
def test_caches_may_be_in_the_home_folder(
    options: type[Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~/cache", Path("~/cache")):
        assert getattr(options_of(options, {name: path}, "x"), name) == tmp_path / "cache"
