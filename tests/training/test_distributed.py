"""Two processes compute what one computes; devices and precisions that do not exist are rejected."""

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from vitcompress import cli
from vitcompress.errors import DeviceError
from vitcompress.io.files import read_json
from vitcompress.io.hardware import check_device, parse_device
from vitcompress.io.tensors import load_tensors
from vitcompress.training import distributed
from vitcompress.training.distributed import Runtime, derived_seed, start

SCRIPT = Path(__file__).parents[1] / "helpers" / "distributed_training.py"
ROUNDING = 2.0**-53  # float64
# One gradient entry adds up at most 8 images x 5 tokens x 64 channels, some ten times over through two blocks.
ADDITIONS = 8 * 5 * 64 * 10
GRADIENT = 1.0  # no entry of a gradient is larger here
STEPS = 9  # 3 epochs of 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[dict[str, Tensor], Any]]:
    """Tensors and facts by number of processes."""
    folder = tmp_path_factory.mktemp("worlds")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    places = {world: folder / str(world) for world in (1, 2)}
    return {
        world: (load_tensors(place / "tensors.safetensors"), read_json(place / "facts.json"))
        for world, place in places.items()
    }


def largest_difference(runs: dict[int, tuple[dict[str, Tensor], Any]], prefix: str) -> float:
    one, two = (runs[world][0] for world in (1, 2))
    return max(float((one[name] - two[name]).abs().max()) for name in one if name.startswith(prefix))


def test_gradients_of_weights_and_scores_agree(runs: Any) -> None:
    gradients = {name: value for name, value in runs[1][0].items() if name.startswith("gradient.")}
    scores = [float(value) for name, value in gradients.items() if name.startswith("gradient.scores")]
    assert len(scores) == 4 and min(map(abs, scores)) > 1e-6
    assert max(float(value.abs().max()) for value in gradients.values()) < GRADIENT
    assert largest_difference(runs, "gradient.") <= ADDITIONS * ROUNDING * GRADIENT


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weights_and_scores_agree(runs: Any, optimizer: str) -> None:
    tensors, error = runs[1][0], ADDITIONS * ROUNDING * GRADIENT
    # SGD with momentum 0.9: a gradient's error enters up to 1 / (1 - 0.9) times, and every later step amplifies it by
    # 1 + lr * curvature, 10 over all steps. AdamW divides by sqrt(v) + 1e-8 at least, which magnifies the error of a
    # gradient near 0 by up to 1e8.
    allowed = {"sgd": STEPS * 0.05 * error * 10 * 10, "adamw": STEPS * 1e-3 * error * 1e8}[optimizer]
    assert largest_difference(runs, f"{optimizer}.") <= allowed
    moved = [
        float((tensors[f"{optimizer}.{name[6:]}"] - tensors[name]).abs().max())
        for name in tensors
        if name.startswith("start.") and "_extra_state" not in name
    ]
    assert min(moved) > 10 * allowed, "weights that hardly move cannot disagree"


def test_choices_and_history_agree(runs: Any) -> None:
    for optimizer in ("sgd", "adamw"):
        one, two = runs[1][1][optimizer], runs[2][1][optimizer]
        assert one["gates"] == two["gates"] and 0.0 in one["gates"].values() and one["chosen"] == two["chosen"]
        for a, b in zip(one["history"], two["history"], strict=True):
            assert a["heldout"]["correct"] == b["heldout"]["correct"] and a["ema"]["correct"] == b["ema"]["correct"]
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)  # losses are added up in float32


def test_sums_over_images_agree(runs: Any) -> None:
    (one, facts), (two, shared) = runs[1], runs[2]
    assert shared["world"] == 2 and shared["from_rank_0"] == {"rank": 0}
    assert facts["correct"] == shared["correct"] and 0 < sum(facts["correct"]) < 24
    assert {k: v for k, v in facts["accuracy"].items() if k != "loss"} == {
        k: v for k, v in shared["accuracy"].items() if k != "loss"
    }
    assert facts["accuracy"]["total"] == 24
    # The weights behind the 24 images' sum of entropies differ by what AdamW allowed above, times the sum's slope.
    assert float((one["entropy"] - two["entropy"]).abs()) <= 24 * 1e3 * largest_difference(runs, "adamw.") + 1e-12
    assert float(one["entropy"]) > 0


# --------------------------------------------------------------------------------------------------------- one process


def test_a_single_process_is_a_world_of_one() -> None:
    runtime, module = start("cpu"), nn.Linear(2, 2)
    assert (runtime.rank, runtime.world_size, runtime.is_main) == (0, 1, True)
    assert runtime.wrap(module) is module and runtime.broadcast([1]) == [1]
    assert runtime.all_sum(torch.ones(2)).dtype == torch.float64
    runtime.barrier()


JOINED_BY_THE_CALLER = """
import sys
import torch
from vitcompress.training.distributed import start
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
runtime = start("cpu")
print(runtime.rank, runtime.world_size, runtime.joined, float(runtime.all_sum(torch.tensor(rank + 1.0))))
torch.distributed.destroy_process_group()
"""


def test_a_group_that_the_caller_joined_without_variables_is_used(tmp_path: Path) -> None:
    """As in processes of torch.multiprocessing."""
    words = [[sys.executable, "-c", JOINED_BY_THE_CALLER, str(rank), str(tmp_path / "meet")] for rank in (0, 1)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    both = [subprocess.Popen(one, env=environment, stdout=subprocess.PIPE, text=True) for one in words]
    last = [one.communicate(timeout=300)[0].splitlines()[-1] for one in both]  # torch 2.8 prints lines of Gloo before
    assert last == [f"{rank} 2 False 3.0" for rank in (0, 1)]


def test_a_rank_without_other_processes_is_that_of_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    runtime = start("cpu")
    assert runtime.is_main and runtime.world_size == 1
    assert "digits_hetdpt" in CliRunner().invoke(cli.main, ["recipes"]).stdout


def test_cuda_without_a_number_is_the_gpu_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (parse_device("cuda"), parse_device("cuda:2")) == (("cuda", 0), ("cuda", 2))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert (parse_device("cuda"), parse_device("cuda:0")) == (("cuda", 1), ("cuda", 0))


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu", "'tpu' is unknown"),
        ("cpu:1", "'cpu:1' is unknown"),
        ("cuda:99", "torch sees"),
        ("cuda:x", "unknown"),
    ],
)
def test_devices_that_are_not_there_are_rejected(device: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message) as caught:
        start(device)
    assert caught.value.hint


def test_a_gpu_that_only_emulates_bf16_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turing: by its own word torch supports bf16 there, as tensors of it can be made."""
    about = SimpleNamespace(major=7, minor=5)
    settings = {
        **dict.fromkeys(("is_available", "_check_bf16_tensor_supported"), True),
        "device_count": 1,
        "current_device": 0,
        "get_device_name": "Tesla T4",
        "get_device_properties": about,
    }
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (about.major, about.minor))
    for name, setting in settings.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, setting=setting: setting)
    assert torch.cuda.is_bf16_supported()
    with pytest.raises(DeviceError, match="Tesla T4 does not support it"):
        check_device("cuda", "bf16")
    about.major = 8
    check_device("cuda", "bf16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_rejected() -> None:
    with pytest.raises(DeviceError, match="0 CUDA devices"):
        start("cuda")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has an Apple GPU")
def test_an_apple_gpu_that_is_not_there_is_rejected() -> None:
    with pytest.raises(DeviceError, match="no Apple GPU"):
        start("mps")


def test_autocast_follows_the_precision() -> None:
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    for amp, dtype in (("none", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with Runtime(torch.device("cpu"), amp).autocast():  # type: ignore[arg-type]
            assert linear(x).dtype == dtype


def test_seeds_depend_on_every_part() -> None:
    seeds = {derived_seed(*parts) for parts in ((0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), ("0", "a", 1))}
    assert len(seeds) == 5 and derived_seed(0, "a", 1) in seeds


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_whose_other_never_joins_ends_with_one_message(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = str(other.getsockname()[1])
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "PATIENCE", timedelta(seconds=2))
    result = CliRunner().invoke(cli.main, ["recipe", "digits_hetdpt", "--out", str(tmp_path / "run"), "--json"])
    error = json.loads(result.stdout)
    assert result.exit_code == 2 and error["kind"] == "DeviceError", result.output
    assert error["error"].startswith("2 processes did not meet within 0:00:02: ") and "torchrun" in error["hint"]
    assert not list(tmp_path.iterdir())
