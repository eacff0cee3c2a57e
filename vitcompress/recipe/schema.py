"""The tables of a recipe. Each table is the options of the module that does the work, so a key is described once:
`[data]` is `DataOptions`, `[dense]` and `[finetune]` are `TrainOptions`, each `[[step]]` the options of its method.
"""

from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, Literal

import tomli_w
from annotated_types import Ge, Gt, Le
from pydantic import JsonValue, create_model
from pydantic_core import to_jsonable_python

from vitcompress.exporters.options import ExportOptions, Positive
from vitcompress.io.validation import STRICT, Doc
from vitcompress.training.options import DataOptions, Seed, TrainOptions


@dataclass(frozen=True)
class ModelTable:
    """The dense model, as `timm.create_model(name, **args)` builds it."""

    name: Annotated[str, Doc("timm architecture name")]
    args: Annotated[dict[str, JsonValue], Doc("arguments, as in { img_size = 384 }")] = field(default_factory=dict)
    weights: Annotated[
        str,
        Doc("`hub` (timm's pretrained weights), `random`, `train` (trained first, see [dense]), or a file or folder"),
    ] = "hub"
    classes: Annotated[int | None, Ge(2), Doc("number of classes, where the data does not define it")] = None
    class_names: Annotated[str | None, Doc("file of class names: one per line, or a JSON list or class_to_idx")] = None
    new_head: Annotated[bool, Doc("accept weights with another number of classes and train a new head")] = False


@dataclass(frozen=True)
class Finetune(TrainOptions):
    """The recovery training after all steps."""

    teacher: Annotated[
        str | None,
        Doc(
            "`dense` (the model before pruning), a run folder, or a timm name, also NAME?num_heads=4; with one, "
            "distillation is `soft` by default"
        ),
    ] = None
    teacher_weights: Annotated[str | None, Doc("a checkpoint for a timm name; None: timm's pretrained weights")] = None


@dataclass(frozen=True)
class QuantizeTable:
    """The training of the folded model that computes in the int8 or fp8 of the exports."""

    epochs: Annotated[int, Ge(0), Doc("passes over the training images; 0: none")] = 0
    lr: Annotated[float | None, Gt(0), Doc("peak learning rate; None: a tenth of that of [finetune]")] = None
    ranges: Annotated[Literal["fixed", "learned"], Doc("of inputs of layers: calibrated, or trained")] = "learned"


@dataclass(frozen=True)
class ExportTable(ExportOptions):
    """Which files are exported, and how."""

    formats: Annotated[tuple[str, ...], Doc("onnx, openvino, trt, trt-rtx; each uses its own options")] = ("onnx",)


@dataclass(frozen=True)
class ProtocolTable:
    """How artifacts are measured."""

    protocol: Annotated[Literal["paper", "robust"], Doc("`vitcompress bench --help` describes both")] = "robust"
    batch: Annotated[Positive | None, Doc("images per call; None: the protocol's value")] = None
    warmup: Annotated[int | None, Ge(0), Le(2**20), Doc("calls before measuring; None: the protocol's value")] = None
    runs: Annotated[Positive | None, Doc("measured calls; None: the protocol's value")] = None


@dataclass(frozen=True)
class BenchTable(ProtocolTable):
    """How the dense and the compressed model are measured."""

    runtimes: Annotated[
        tuple[str, ...] | None,
        Doc("`torch`, `onnxruntime`, or another exported format; None: torch and all exported formats; []: none"),
    ] = None


@dataclass(frozen=True)
class RunTable:
    """Where and how everything runs."""

    seed: Annotated[Seed, Doc("of all random numbers")] = 0
    device: Annotated[str, Doc("`auto`, `cpu`, `cuda`, `cuda:1`, `mps`")] = "auto"
    amp: Annotated[Literal["none", "fp16", "bf16"], Doc("half precision while training")] = "none"
    threads: Annotated[
        int | None,
        Ge(1),
        Le(1024),
        Doc("of torch on the CPU, up to folding; None: its default. Tiny models train fastest with 1"),
    ] = None


@dataclass(frozen=True)
class Published:
    """Figures from a publication. The report quotes them beside our own measurements and never mixes them."""

    source: Annotated[str, Doc("publication and table")]
    hardware: Annotated[str, Doc("that `images_per_second` and `speedup` were measured on")]
    top1: Annotated[float | None, Ge(0), Le(100), Doc("accuracy in percent")] = None
    params_m: Annotated[float | None, Ge(0), Doc("parameters in millions")] = None
    macs_g: Annotated[float | None, Ge(0), Doc("multiply-accumulate operations in billions")] = None
    images_per_second: Annotated[float | None, Ge(0), Doc("throughput")] = None
    speedup: Annotated[float | None, Ge(0), Doc("over the dense model")] = None
    macs_linear: Annotated[bool, Doc("the published MACs leave out the products inside attention")] = False
    deviation: Annotated[str, Doc("why the counted size of this recipe differs from the published one")] = ""
    note: Annotated[str, Doc("any remark")] = ""


@dataclass(frozen=True)
class Step:
    """One pruning step: a method of `METHODS` and its options."""

    method: str
    options: Any


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe that passed every check which needs neither the model nor the data."""

    model: ModelTable
    name: str = ""
    summary: str = ""
    data: DataOptions = DataOptions()  # noqa: RUF009 (frozen)
    dense: TrainOptions | None = None
    steps: tuple[Step, ...]
    finetune: Finetune = Finetune()
    quantize: QuantizeTable = QuantizeTable()
    export: ExportTable = ExportTable()
    bench: BenchTable = BenchTable()
    run: RunTable = RunTable()
    published: Published | None = None

    def to_toml(self) -> str:
        """All settings including defaults, as TOML that loads as an equal recipe. Equal recipes have equal text."""
        tables = {name: value for name, value in vars(self).items() if name != "steps"}
        steps = [{"method": step.method, **plain_data(step.options)} for step in self.steps]
        return tomli_w.dumps({**plain_data(tables), "step": steps})


_TABLES = [field for field in fields(Recipe) if field.name != "steps"]  # the keys of a step depend on its method
_TYPES: Any = {f.name: (f.type, ... if f.default is MISSING else f.default) for f in _TABLES}
Tables = create_model("Tables", __config__=STRICT, **_TYPES, step=(Any, None))


def plain_data(value: Any) -> Any:
    """A dataclass, or what it contains, as nested dicts and lists without None values, which TOML cannot express."""
    data = to_jsonable_python(value)
    if isinstance(data, dict):
        return {key: plain_data(inner) for key, inner in data.items() if inner is not None}
    return [plain_data(inner) for inner in data] if isinstance(data, list) else data
