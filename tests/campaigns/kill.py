"""Kill runs at random moments, continue them, and compare the results with those of runs that were never stopped.

    python -m tests.campaigns.kill --runs 100

The runs are those of all digits recipes, with tiny models and short trainings. Half of the kills are sent just before
a random change of a file, half after a random time. A run is clean if the same command then ends with exit code 0, the
plan and the weights are those of the undisturbed run, `verify` passes, and exactly the same files exist: nothing that
is half written. Every tenth run has two processes, started by torchrun; the signal goes to all or to one worker.
Prints `N of M clean`; exit code 1 unless all are. Other processes are forked from one that has imported everything.
"""

import argparse
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from vitcompress import cli
from vitcompress.io.files import read_json, write_json
from vitcompress.io.hardware import cpu_name, package_versions
from vitcompress.training.data import open_data
from vitcompress.training.options import DataOptions

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
COMMON = (
    "data.heldout=0.8",  # few images to train on
    *("dense.epochs=2", "dense.batch_size=128", "dense.warmup_epochs=0"),
    *("finetune.epochs=2", "finetune.batch_size=128", "finetune.warmup_epochs=0"),
    *("bench.protocol=paper", "bench.batch=2", "bench.warmup=1", "bench.runs=3"),
)
SMALL = ("embed_dim=16", "depth=3", "num_heads=2", "patch_size=4")
VIT = tuple(f"model.args.{size}" for size in SMALL)
BUDGET, TE = "step.0.pruned_layers=2", "step.0.te.images=40"
SEARCH = ("step.0.search.factor=0.25", "step.0.search.images_per_class=4")
COLLECTION = ("step.0.collection.epochs=1", "step.0.collection.images_per_class=4", "step.0.collection.interleaved=2")
RECIPES: dict[str, tuple[str, ...]] = {
    "activation_only": (*VIT, BUDGET, TE),
    "hetdpt": (*VIT, BUDGET, TE, *SEARCH, *COLLECTION),
    "hetdpt_plus": (
        *VIT,
        BUDGET,
        TE,
        *SEARCH,
        *COLLECTION,
        "step.1.epochs=1",
        "step.3.amount=",
        "step.3.target=ratios",
    ),
    "isomorphic": (*VIT, "step.0.images=40", "step.0.amount=", "step.0.target=ratios"),
    "magnitude": VIT,
    "no_step1": (*VIT, BUDGET, *SEARCH),
    "no_step2": (*VIT, BUDGET, TE, *COLLECTION),
    "nose": (*VIT, BUDGET, TE),
    "random": (*VIT, BUDGET),
    "sero": (*VIT, "step.0.epochs=2"),
    "sero_swin": (
        *("model.args.embed_dim=16", "model.args.depths=[2,1]", "model.args.num_heads=[2,2]"),
        "step.0.epochs=2",
    ),
    "te_static": (*VIT, BUDGET, TE),
    "up": (*VIT, "step.0.images=40", "step.0.target_args={embed_dim=8,num_heads=1,depth=2}"),
    "up_pvt": (
        *("model.args.embed_dims=[16,32]", "model.args.depths=[1,2]", "model.args.num_heads=[1,2]"),
        *("step.0.images=40", "step.0.target_args={embed_dims=[8,16],depths=[1,1]}"),
    ),
}
WITHOUT_EXPORT = {
    "activation_only",
    "magnitude",
    "no_step1",
    "no_step2",
    "nose",
    "random",
    "sero_swin",
    "te_static",
    "up_pvt",
}
TWO_PROCESSES = ("hetdpt", "sero", "up", "isomorphic")
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")  # audit events
EXIT_SECONDS = 20.0  # for the processes that torchrun leaves behind


@dataclass(frozen=True)
class Kill:
    """One kill. share: of the changes of files, or of the time, after which it happens, from 0 to 1."""

    recipe: str
    processes: int
    signal: str
    moment: str  # `change`, `time`; of two processes `time` and `time, one worker`
    share: float


@dataclass(frozen=True)
class Whole:
    """An undisturbed run: its folder, seconds until it created its folder and to its end, and changes of files."""

    place: Path
    start: float
    seconds: float
    changes: int


def command(recipe: str) -> list[str]:
    formats = "[]" if recipe in WITHOUT_EXPORT else '["onnx"]'
    sets = (*COMMON, *RECIPES[recipe], f"export.formats={formats}")
    return ["recipe", f"digits_{recipe}", "--out", "run", *(word for setting in sets for word in ("--set", setting))]


class Changes:
    """Counts changes of files, and sends this process a signal just before change number `last`."""

    def __init__(self, last: int | None = None, number: int = signal.SIGKILL) -> None:
        self.count, self._last, self._number = 0, last, number

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event in CHANGES:
            self.count += 1
            if self.count == self._last:
                os.kill(os.getpid(), self._number)


def fork(place: Path, words: Sequence[str], changes: Changes) -> int:
    """Start the command line in a process of its own, in the folder `place`; returns the number of the process."""
    if child := os.fork():
        return child
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process of a shell ignores it
        os.chdir(place)
        tempfile.tempdir = str(place.parent)
        with Path(f"{place}.txt").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.addaudithook(changes)
        cli.main(words)
    except SystemExit as exit:
        code = int(exit.code or 0)
    finally:
        Path(f"{place}.count").write_text(str(changes.count))
        sys.stderr.flush()
        os._exit(code)


def wait(child: int) -> int:
    """The exit code of a forked process, or minus its signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def torchrun(place: Path, words: Sequence[str]) -> subprocess.Popen[bytes]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "vitcompress"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with Path(f"{place}.txt").open("wb") as log:
        return subprocess.Popen(
            [*start, *words], cwd=place, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def run_whole(place: Path, recipe: str, processes: int) -> Whole:
    """Run a recipe without a kill. Raises RuntimeError if it fails."""
    place.mkdir(parents=True)
    began = time.perf_counter()
    started = 0.0
    if processes == 1:
        code = wait(fork(place, command(recipe), Changes()))
    else:
        process = torchrun(place, command(recipe))
        while process.poll() is None:
            time.sleep(0.02)
            started = started or (time.perf_counter() - began if (place / "run").exists() else 0.0)
        code = process.returncode
    seconds = time.perf_counter() - began
    if code:
        raise RuntimeError(f"{recipe} failed with exit code {code}:\n{Path(f'{place}.txt').read_text()[-2000:]}")
    count = int(Path(f"{place}.count").read_text()) if processes == 1 else 0
    return Whole(place, started, seconds, count)


def run_killed(place: Path, kill: Kill, whole: Whole) -> int:
    """Run a recipe and kill it on the way. Returns its exit code, 0 if it ended before."""
    place.mkdir(parents=True)
    number = signal.Signals[kill.signal]
    if kill.moment == "change":
        return wait(fork(place, command(kill.recipe), Changes(1 + int(kill.share * whole.changes), number)))
    seconds = whole.start + kill.share * (whole.seconds - whole.start)
    if kill.processes == 1:
        child = fork(place, command(kill.recipe), Changes())
        time.sleep(seconds)
        os.kill(child, number)
        return wait(child)
    process = torchrun(place, command(kill.recipe))
    time.sleep(seconds)
    if process.poll() is not None:
        return process.returncode
    family = psutil.Process(process.pid).children(recursive=True)
    for one in (psutil.Process(process.pid), *family) if kill.moment == "time" else family[-1:]:
        with suppress(psutil.NoSuchProcess):
            one.send_signal(number)
    code = process.wait()
    for orphan in psutil.wait_procs(family, EXIT_SECONDS)[1]:  # of a launcher that was killed
        orphan.kill()
    return code


def problems(place: Path, kill: Kill, whole: Whole) -> Iterator[str]:
    """What is wrong after the run in `place` was continued."""
    if kill.processes == 1:
        code = wait(fork(place, command(kill.recipe), Changes()))
    else:
        code = torchrun(place, command(kill.recipe)).wait()
    if code:
        yield f"the run was continued and ended with exit code {code}: {Path(f'{place}.txt').read_text()[-500:]}"
        return
    for name in ("plan.json", "model.safetensors"):
        if (place / "run" / name).read_bytes() != (whole.place / "run" / name).read_bytes():
            yield f"{name} is not that of the undisturbed run"
    ours, expected = ({str(path.relative_to(root)) for path in root.rglob("*")} for root in (place, whole.place))
    if different := sorted(ours ^ expected):
        yield f"other files than in the undisturbed run: {different}"
    if code := wait(fork(place, ["verify", "run"], Changes())):
        yield f"verify ended with exit code {code}: {Path(f'{place}.txt').read_text()[-500:]}"


def plan_kills(runs: int, recipes: Sequence[str], seed: int) -> list[Kill]:
    """Recipes and signals in turn, at moments that cover the whole run evenly."""
    chance, kills = random.Random(seed), list[Kill]()
    for number in range(runs):
        two = number % 10 == 9
        moment = chance.choice(("time", "time, one worker") if two else ("change", "time"))
        recipe = TWO_PROCESSES[number // 10 % len(TWO_PROCESSES)] if two else recipes[number % len(recipes)]
        which = SIGNALS[(number // len(recipes) + number) % len(SIGNALS)]
        kills.append(Kill(recipe, 1 + two, which.name, moment, chance.random()))
    return kills


def campaign(folder: Path, kills: Sequence[Kill], first: int = 0) -> Iterator[dict[str, Any]]:
    """The result of each kill from number `first` on: `Kill`, the exit code, and `problems`, empty if it was clean."""
    open_data(DataOptions(), 0)  # import what runs import
    if any(kill.recipe not in WITHOUT_EXPORT for kill in kills):
        torch.onnx.export(nn.Linear(2, 2), (torch.zeros(2, 2),), dynamo=True, verbose=False)
    torch.set_num_threads(1)
    whole_run = cache(lambda recipe, processes: run_whole(folder / f"{recipe}-{processes}/whole", recipe, processes))
    for number, kill in enumerate(kills[first:], first):
        whole, place = whole_run(kill.recipe, kill.processes), folder / str(number) / "killed"
        while (code := run_killed(place, kill, whole)) == 0:  # it was faster than the undisturbed run
            shutil.rmtree(place.parent)
            kill = replace(kill, share=0.7 * kill.share)
        stage = ([*filter(str.strip, Path(f"{place}.txt").read_text().splitlines())] or ["start"])[-1].strip()
        wrong = [*problems(place, kill, whole)]
        if code == -signal.SIGINT:
            wrong.append("Ctrl-C ended the process before it could report that it stops")
        sys.stdout.write(f"{number + 1}: {kill}, exit code {code}, {stage}: {wrong or 'clean'}\n")
        sys.stdout.flush()
        if not wrong:
            shutil.rmtree(place.parent)
        yield {**asdict(kill), "exit_code": code, "last_output": stage, "problems": wrong}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="number of killed runs")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="digits recipes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="new folder for the runs (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="JSON file of the results; a campaign that was stopped continues it")
    options = parser.parse_args(arguments)
    about = {"command": "python -m tests.campaigns.kill", "runs": options.runs, "seed": options.seed}
    about |= {"cpu": cpu_name(), "python": platform.python_version(), "versions": package_versions(("torch", "timm"))}
    results = read_json(options.out)["results"] if options.out and options.out.is_file() else []
    with tempfile.TemporaryDirectory() as temporary:
        kills = plan_kills(options.runs, options.recipes, options.seed)
        for result in campaign((options.work or Path(temporary)).resolve(), kills, len(results)):
            results.append(result)
            if options.out:
                write_json(options.out, {**about, "results": results})
    clean = sum(not result["problems"] for result in results)
    sys.stdout.write(f"{clean} of {len(results)} clean\n")
    return 0 if clean == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
