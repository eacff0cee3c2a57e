"""A recipe is what the user asked for: TOML, checked as a whole, all mistakes reported at once.

The tables of a recipe are the options of the modules that do the work, so that a field is described in one place:
`[data]` is `data.DataOptions`, `[dense]` and `[finetune]` are `train_options.TrainOptions`, each `[[step]]` the options
of its method.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tomli_w
from annotated_types import Ge, Le
from pydantic import BaseModel, BeforeValidator, JsonValue
from pydantic_core import to_jsonable_python

from vitcompress.exporters.options import ExportOptions, Positive
from vitcompress.io.validation import STRICT
from vitcompress.training.data import DataOptions
from vitcompress.training.options import TrainOptions


@dataclass(frozen=True)
class ModelTable:
    """The dense model, as `timm.create_model(name, **args)` builds it.

    weights: `hub` (timm's own), `random`, `train` (trained first, as `[dense]` says), or the path of a checkpoint.
    classes: number of classes where no data says it. new_head: take weights of another class count, with a fresh head.
    """

    name: str  # of the architecture in timm
    args: dict[str, JsonValue] = field(default_factory=dict)  # beside the name, as in { img_size = 384 }
    weights: str = "hub"
    classes: Annotated[int, Ge(2)] | None = None
    new_head: bool = False


@dataclass(frozen=True)
class Finetune(TrainOptions):
    """The recovery training after all steps.

    teacher: `dense` (the model before pruning), a run folder, or a timm name. teacher_weights: a checkpoint for a timm
    name; None takes timm's own from its hub.
    """

    teacher: str | None = None
    teacher_weights: str | None = None


def _listed(value: Any) -> Any:
    """One word for a list of one."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class ExportTable(ExportOptions):
    """What is exported, and how; formats: onnx, openvino, trt, trt-rtx, of which each takes what concerns it."""

    formats: tuple[str, ...] = ("onnx",)
    islands: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()


@dataclass(frozen=True)
class ProtocolTable:
    """How artifacts are measured. batch, warmup, runs: None takes the protocol's own."""

    protocol: Literal["paper", "robust"] = "robust"  # `vitcompress bench --help` tells them apart
    batch: Positive | None = None
    warmup: Annotated[int, Ge(0)] | None = None
    runs: Positive | None = None

    @property
    def changes(self) -> dict[str, int | None]:
        """What of the protocol is set otherwise."""
        return {"batch": self.batch, "warmup": self.warmup, "runs": self.runs}


@dataclass(frozen=True)
class BenchTable(ProtocolTable):
    """How dense and compressed are measured. runtimes: those that both are run in."""

    runtimes: tuple[Literal["onnxruntime", "torch"], ...] = ("onnxruntime", "torch")


@dataclass(frozen=True)
class RunTable:
    """Where and how everything runs. device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.

    threads: of torch on the CPU while it trains, None leaves torch's choice. Models as small as the digits' gain
    nothing from a second thread, and lose much when something else wants that core.
    """

    seed: Annotated[int, Ge(0)] = 0  # of every draw
    device: str = "auto"
    amp: Literal["none", "fp16", "bf16"] = "none"  # half precision while training
    threads: Positive | None = None


@dataclass(frozen=True)
class Published:
    """Figures that somebody else published, quoted in the report beside our own and never mixed with them.

    macs_linear: the published MACs leave out the products inside attention. deviation: why what this recipe comes to,
    as counted without training, is not what was published.
    """

    source: str
    hardware: str
    top1: Annotated[float, Ge(0), Le(100)] | None = None
    params_m: Annotated[float, Ge(0)] | None = None
    macs_g: Annotated[float, Ge(0)] | None = None
    images_per_second: Annotated[float, Ge(0)] | None = None
    speedup: Annotated[float, Ge(0)] | None = None
    macs_linear: bool = False
    deviation: str = ""
    note: str = ""


@dataclass(frozen=True)
class Step:
    """One pruning step: a method of `METHODS` and its options."""

    method: str
    options: Any


class Tables(BaseModel):
    """All of a recipe but its steps, whose form depends on their method."""

    model_config = STRICT

    model: ModelTable
    name: str = ""
    summary: str = ""
    data: DataOptions = DataOptions()
    dense: TrainOptions | None = None
    finetune: Finetune = Finetune()
    export: ExportTable = ExportTable()
    bench: BenchTable = BenchTable()
    run: RunTable = RunTable()
    published: Published | None = None


@dataclass(frozen=True)
class Recipe:
    """A recipe that passed every check that needs neither the model nor the data."""

    name: str
    summary: str
    model: ModelTable
    data: DataOptions
    dense: TrainOptions | None
    steps: tuple[Step, ...]
    finetune: Finetune
    export: ExportTable
    bench: BenchTable
    run: RunTable
    published: Published | None

    def to_toml(self) -> str:
        """Every setting, defaults included; equal recipes give equal text, which loads back to an equal recipe."""
        tables = {name: value for name, value in vars(self).items() if name != "steps"}
        steps = [{"method": step.method, **plain(step.options)} for step in self.steps]
        return tomli_w.dumps({**plain(tables), "step": steps})


def plain(value: Any) -> dict[str, Any]:
    """Dataclasses as tables; what is None is left out, as TOML has no word for it."""
    return dict(_without_none(to_jsonable_python(value)))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value
