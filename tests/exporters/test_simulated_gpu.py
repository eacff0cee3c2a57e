"""Recipes on a simulated GPU."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import whole_runs
from on_simulated_gpu import ENVIRONMENT, needs_onnx_on_cuda

from vitcompress.io.files import read_json

MIXED_DEVICES = """
import numpy as np
import torch

host = torch.randn(3, 4)
gpu, layer, numbers = host.to("cuda"), torch.nn.Linear(4, 4).to("cuda"), torch.tensor([0, 1])
for work in (
    lambda: host + gpu,
    lambda: layer(host),
    lambda: host.add_(gpu),
    lambda: host[numbers.cuda()],
    lambda: torch.index_select(gpu, 0, numbers),
    lambda: torch.randn(3, device="cuda", generator=torch.Generator()),
    lambda: np.asarray(gpu),
):
    try:
        work()
    except (RuntimeError, TypeError):
        continue
    raise AssertionError("both devices in one operation")
layer(gpu + 1.0)[numbers].sum().backward()
assert layer.weight.grad.is_cuda and not layer.weight.detach().cpu().is_cuda and not host.is_cuda
"""
# With everything that training can do on a device.
TRAINING = """
augmentation = { no_aug = false, mixup = 0.8, cutmix = 1.0, reprob = 0.5 }
ema = 0.9
clip_grad = 1.0
"""
STEPS = {
    "hetdpt": None,
    "sero": 'method = "sero"\nsparsity = 0.3\nepochs = 2\nround_to = 2',
    "upvit": 'method = "upvit"\ntarget_args = { embed_dim = 8, num_heads = 1 }',
    "isomorphic": 'method = "isomorphic"\nalign = { residual = 4, ffn = 4, head_dim = 2 }',
}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU: run the tests marked gpu")


Run = Callable[..., None]
# Runs each line of its input, the path of a file for the output, code and its arguments, in a fork, and prints whether
# it succeeded. torch and timm are loaded once.
FORKS = """
import json, os, sys, traceback
import vitcompress as vc

vc.export
for line in sys.stdin:
    output, code, *words = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            sys.argv[1:] = words
            for stream in (1, 2):
                os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            exec(code, {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    print(os.waitpid(child, 0)[1] == 0, flush=True)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs code, which must succeed, in a process of its own with a simulated GPU."""
    command, pipes = [sys.executable, "-c", FORKS], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=ENVIRONMENT, text=True, **pipes) as process:  # type: ignore[call-overload]

        def run_code(code: str, *words: str | Path) -> None:
            output = tmp_path_factory.mktemp("run") / "output.txt"
            process.stdin.write(json.dumps([str(output), code, *map(str, words)]) + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "True\n", output.read_text()

        yield run_code
        process.stdin.close()


def test_it_rejects_what_a_gpu_rejects(run: Run) -> None:
    run(MIXED_DEVICES)


AMP = {"hetdpt": "none", "sero": "fp16", "upvit": "none", "isomorphic": "fp16"}
COMMAND = """
import sys
from vitcompress.cli import main

try:
    main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code, ended.code
"""


@needs_onnx_on_cuda
@pytest.mark.parametrize("method", STEPS)
def test_recipes_have_everything_on_the_gpu(method: str, run: Run, tmp_path: Path) -> None:
    step = STEPS[method]
    text = whole_runs.RECIPE if step is None else whole_runs.with_steps(step)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text.replace("[finetune]", f"[finetune]{TRAINING}"))
    options = ("--device", "cuda", "--set", f"run.amp={AMP[method]}", "--json", "--debug")
    run(COMMAND, "recipe", recipe, "--out", tmp_path / "run", *options)
    report = read_json(tmp_path / "run" / "report.json")
    assert [row["device"] for entry in report["bench"] for row in entry["rows"]] == ["cuda:0"] * 4


PLANS = """
import sys
from pathlib import Path

from tests.methods.test_methods import METHODS, plan_on

for name in METHODS:
    plans = [plan_on(device, name, Path(sys.argv[1], name, device)) for device in ("cuda", "cpu")]
    assert plans[0] == plans[1], name
"""


def test_every_method_plans_for_a_model_on_the_gpu(run: Run, tmp_path: Path) -> None:
    """As `vc.plan` does, which moves the model there; a recipe passes one on the CPU."""
    run(PLANS, tmp_path)


EVALUATE = """
import sys, torch
import vitcompress as vc

torch.manual_seed(0)
sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 4}
model = vc.create_model("vit_tiny_patch16_224", **sizes)
torch.nn.init.normal_(model.head.weight, std=10)  # logits that differ clearly
images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
data = [(images, model.eval()(images).argmax(1))]
assert torch.cuda.is_available() and next(model.parameters()).device.type == "cpu"
torch.cuda.set_device = None  # it is a setting of the caller
for name, options in (
    ("model.xml", {}),
    ("model.onnx", {}),
    ("model.onnx", {"precision": "fp16"}),
    ("model.xml", {"precision": "int8", "islands": ("auto",), "data": data}),
    ("model.onnx", {"precision": "int8", "smooth": True, "data": data}),
):
    file = vc.export(model.to("cuda" if options else "cpu"), f"{sys.argv[1]}/{name}", **options)
    assert vc.evaluate(file, data).correct == vc.evaluate(model, data).correct == 8, options
    assert model.head.weight.is_cuda == bool(options)
"""


def test_files_are_evaluated_where_they_run(run: Run, tmp_path: Path) -> None:
    """The device `auto` is the GPU for a model, and for a file the one that it was exported for."""
    run(EVALUATE, tmp_path)


RECORDED = """
import weakref
import torch
import vitcompress as vc
from vitcompress.exporters.runner import RunnerOptions
from vitcompress.exporters.torch_runner import TorchRunner

inputs = []


class Recorder(TorchRunner):
    def _record(self, resident):
        inputs.append(weakref.ref(resident))
        return super()._record(resident)


sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 4}
model = vc.create_model("vit_tiny_patch16_224", **sizes)
for transfers in (False, True):
    runner = Recorder(model, RunnerOptions(device="cuda", cuda_graph=True, transfers=transfers), name="model")
    call = runner.bind(torch.randn(2, 3, 16, 16))
    assert inputs[-1]() is not None, transfers
    runner.close()
    assert inputs[-1]() is None, transfers
"""


def test_a_recorded_graph_keeps_its_input(run: Run) -> None:
    """The graph reads its memory and does not reference the tensor."""
    run(RECORDED)


TF32 = """
import sys
from contextlib import suppress
import torch
from torch import backends
import vitcompress as vc
from vitcompress.exporters.runner import RunnerOptions
from vitcompress.exporters.torch_runner import TorchRunner

PARTS = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
GETTERS = (
    torch.get_float32_matmul_precision, lambda: backends.cuda.matmul.allow_tf32, lambda: backends.cudnn.allow_tf32
)


def settings():
    old = []
    for getter in GETTERS:
        try:
            old.append(getter())
        except RuntimeError:  # the caller has mixed both interfaces
            old.append(None)
    return old, [part.fp32_precision for part in PARTS]


torch.cuda.get_device_capability = lambda *where: (8, 0)
sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 4}
model, images = vc.create_model("vit_tiny_patch16_224", **sizes), torch.randn(2, 3, 16, 16)
exec(sys.argv[1])
before = settings()
runners = {
    (device, precision): TorchRunner(model, RunnerOptions(device=device, precision=precision), name="model")
    for device, precision in (("cpu", "fp32"), ("cuda", "tf32"), ("cuda", "fp32"))
}
seen = []
model.head.register_forward_hook(lambda *about: seen.append(settings()))
for runner in runners.values():
    model.to(runner._device)
    runner(images)
assert seen[0] == before, (seen[0], before)
for (old, new), on in zip(seen[1:], (True, False), strict=True):
    assert old == ["high" if on else "highest", on, on], old
    assert new == ["tf32" if on else "ieee"] * len(PARTS), new
for runner in reversed(runners.values()):
    runner.close()
after = settings()
assert after[1] == before[1], (after, before)
assert all(now == then for now, then in zip(after[0], before[0]) if then is not None), (after, before)
"""


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch before 2.9 has one interface")
@pytest.mark.parametrize(
    "setting",
    [
        "",
        "backends.fp32_precision = 'tf32'",
        "backends.cuda.matmul.fp32_precision = 'tf32'",
        "backends.cudnn.conv.fp32_precision = 'ieee'",
        "backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('medium')",
    ],
)
def test_tf32_is_set_and_restored_in_both_interfaces_of_torch(setting: str, run: Run) -> None:
    run(TF32, setting)
