"""Types of the records in report.json, bench.json and verify.json, as they are read from disk, and their check.

`tests/helpers/report_schemas.py` generates the JSON Schemas from these types. Shares are between 0 and 1, sizes in
bytes, times in milliseconds where a name does not say seconds, and None means unknown or not measured.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NotRequired, Required, TypeVar

from annotated_types import Ge
from typing_extensions import TypedDict

from vitcompress.io.checks import Status
from vitcompress.io.text import Table
from vitcompress.models.cost import Cost
from vitcompress.models.create import InputConfig
from vitcompress.plan import Plan
from vitcompress.recipe.schema import Published
from vitcompress.surgery.fold import FoldRecord
from vitcompress.training.metrics import McNemarRecord as McNemarRecord

T = TypeVar("T")
if TYPE_CHECKING:

    class RecordOf(Mapping[str, Any], Generic[T]):
        """A dataclass T as plain data: its fields are the keys."""

else:
    RecordOf = Annotated[T, "as plain data"]
SpeedVerdict = Literal["faster", "slower", "not distinguishable"]

# ---------------------------------------------------------------------------------------------------------- bench.json


class RuntimeRecord(TypedDict):
    runtime: str
    device: str
    precision: str
    threads: int | str | None


class RunnerRecord(RuntimeRecord):
    """Settings of one artifact in one runtime (`Runner.describe`); the last keys exist for some runtimes only."""

    artifact: str
    sha256: str | None
    runtime_version: str | None
    device_name: str | None
    provider: str | None
    tf32: bool | None
    compile: bool
    cuda_graph: bool
    transfers: bool
    graph_optimization: str | int | None
    classes: NotRequired[int | None]
    input_type: NotRequired[str]
    batch_range: NotRequired[Sequence[int] | None]
    provider_versions: NotRequired[Mapping[str, str]]
    provider_options: NotRequired[Mapping[str, object]]
    nodes_on_cpu: NotRequired[Sequence[str]]
    streams: NotRequired[int]
    weight_bytes: NotRequired[int]
    sm: NotRequired[Sequence[int] | None]
    verified: NotRequired[bool | None]
    trusted_without_sidecar: NotRequired[bool]
    process: NotRequired[int]


class LatencyRecord(TypedDict):
    """Percentiles of single runs; None with fewer than ten samples above."""

    mean: float
    min: float
    p50: float
    p90: float | None
    p99: float | None
    max: float


class MemoryRecord(TypedDict):
    """cuda_peak_bytes: weights and one run in torch on a GPU. process_*: of a process that runs only this artifact."""

    cuda_peak_bytes: int | None
    process_start_bytes: int | None
    process_peak_bytes: int | None


class SpeedRecord(RuntimeRecord):
    """The part of a `BenchRow` that is repeated beside the accuracy of a file."""

    images_per_second: float
    latency_ms: LatencyRecord
    batch: int
    protocol: str


class BenchRow(RunnerRecord, SpeedRecord):
    """One artifact at one batch size, with every sample: `samples_ms` are single runs by block."""

    input_size: Sequence[int]
    input: str
    warmup: int
    warmup_seconds: float
    settled: bool | None
    runs: int
    clock: Literal["wall", "cuda events"]
    variation: float | None
    drift: float | None
    images_per_joule: float | None
    joules: float | None
    energy_of: str
    memory: MemoryRecord
    samples_ms: Sequence[Sequence[float]]
    block_wall_ms: Sequence[float]


class RatioRecord(TypedDict):
    """Speed of artifact `b` over artifact `a`. ci95: None as the upper end if there are too few rounds."""

    a: str
    b: str
    median: float
    ci95: Sequence[float | None]
    verdict: SpeedVerdict
    batch: int


class CpuState(TypedDict):
    """clock_mhz: of the slowest and the fastest core."""

    load_average: float | None
    clock_mhz: Sequence[float] | None
    governor: str | None


class GpuSettings(TypedDict):
    """Properties of a GPU that do not change during a measurement."""

    driver: str
    vbios: str | None
    power_limit_w: float | None
    persistence: int | None
    mig: int | None
    max_sm_clock_mhz: int | None


class GpuSummary(TypedDict):
    """Minimum and maximum over `looks` readings, and everything that slowed down or shared the GPU."""

    sm_clock_mhz: Sequence[float] | None
    memory_clock_mhz: Sequence[float] | None
    temperature_c: Sequence[float] | None
    power_w: Sequence[float] | None
    busy_percent: Sequence[float] | None
    throttled_by: Sequence[str] | None
    foreign_processes: Sequence[int] | None
    looks: int


class Conditions(TypedDict):
    """State of the machine during the measurement of one batch size."""

    cpu_before: CpuState
    cpu_after: CpuState
    other_processes_cores: float | None
    held_back_by_quota: int | None
    gpu: GpuSummary | None
    gpu_unwatched: str | None


class MachineRecord(TypedDict):
    """Hardware and versions; in bench.json also the settings of the GPUs and the conditions of each batch size."""

    system: str
    python: str
    cpu: str
    cpu_flags: Sequence[str]
    cpu_cores: int | None
    cpu_cores_usable: int
    cpu_quota_cores: float | None
    memory_gib: float | None
    gpus: Sequence[str]
    cuda: str | None
    environment: Mapping[str, str]
    versions: Mapping[str, str]
    gpu_settings: NotRequired[Sequence[GpuSettings | str]]
    conditions: NotRequired[Sequence[Conditions]]


class BenchRecord(TypedDict):
    """One interleaved measurement. ratios: of each later artifact over the first, at each batch size."""

    bench_format: int
    rows: Sequence[BenchRow]
    ratios: Sequence[RatioRecord]
    machine: MachineRecord
    warnings: Sequence[str]
    notes: Sequence[str]
    disturbed: Sequence[str]
    fail_under: float | None
    passed: bool


# --------------------------------------------------------------------------------------------------------- verify.json


class CheckRecord(TypedDict):
    """One check: passed if `value` is at most `tolerance`. command: runs it on the target. applies: see `Check`."""

    name: str
    verdict: Status
    value: float | None
    tolerance: float | None
    detail: str
    command: str | None
    applies: NotRequired[bool]
    passed: bool


class StoredTensor(TypedDict):
    """A tensor in an exported file, under the name that it has there."""

    tensor: str
    shape: Sequence[int]
    bytes: int


class TensorRecord(TypedDict):
    """Shapes of a tensor that the plan changed: dense, planned, in torch and in each exported file."""

    name: str
    change: str
    dense: Mapping[str, Sequence[int]]
    planned: Sequence[int] | None
    torch: Sequence[int] | None
    files: Mapping[str, StoredTensor]


class FileBytes(TypedDict):
    file: str
    bytes: int
    of_model: int
    of_constants: int
    of_graph: int
    parameters: int


class WeightsRecord(TypedDict):
    tensors: Sequence[TensorRecord]
    files: Sequence[FileBytes]


class VerificationRecord(TypedDict):
    """Content of verify.json: passed if no check failed and at least one ran."""

    passed: bool
    checks: Sequence[CheckRecord]
    weights: NotRequired[WeightsRecord]


# --------------------------------------------------------------------------------------------------------- report.json


class AccuracyRecord(TypedDict):
    """Counts and shares of correct images (first, among the first five), mean loss, Wilson's 95 % interval of top-1."""

    images_digest: NotRequired[str]  # of the test images, see training.data; missing in reports of earlier versions
    correct: int
    correct5: int
    total: Annotated[int, Ge(1)]
    loss: float
    top1: float
    top5: float
    top1_ci95: Sequence[float]


class FileAccuracy(AccuracyRecord):
    """Accuracy of an exported file. sha256: of the file. flips: images in another class than by the compressed model;
    missing where only the file was evaluated.
    """

    sha256: NotRequired[str | None]
    flips: NotRequired[int]


class AccuracyPair(TypedDict, total=False):
    """Accuracy on the test images; each other key is the name of an exported file.

    control: the dense model after training as long as the compressed one. mcnemar: dense and compressed model.
    """

    dense: AccuracyRecord
    compressed: AccuracyRecord
    control: AccuracyRecord
    mcnemar: McNemarRecord
    control_mcnemar: McNemarRecord


class RecoveryRecord(TypedDict):
    """Which weights the fine-tuning ended with. kept: `raw` or `ema`."""

    epochs: int
    kept_epoch: int
    kept: str
    heldout: Mapping[str, AccuracyRecord | None]


class ModelRecord(TypedDict, total=False):
    """timm name and arguments of the dense model, its input and classes. uint8: exported files take uint8 images.

    weights: from the hub with the revision. weights_sha256: of the file that they were read from.
    """

    arch: str
    arch_args: Mapping[str, object]
    weights: str
    weights_sha256: str
    input: RecordOf[InputConfig]
    classes: Sequence[str]
    uint8: bool


class ArtifactRecord(TypedDict):
    """One exported file. verified: its outputs were compared with the model's; agreement: the result, as text.

    input: type of its images, `float32` or `uint8`. batch: smallest, best and largest, of an engine. accuracy and speed
    are of the file with this hash. variable_batch: OpenVINO needs one. fp32_layers: a sentence, if a search chose them.
    Earlier reports lack the last keys.
    """

    file: str
    sha256: str
    bytes: int
    precision: str
    verified: bool
    accuracy: FileAccuracy | None
    speed: SpeedRecord | None
    format: NotRequired[str]
    input: NotRequired[str]
    agreement: NotRequired[str]
    batch: NotRequired[Sequence[int] | None]
    variable_batch: NotRequired[bool]
    fp32_layers: NotRequired[str | None]


class Report(TypedDict, total=False):
    """Content of report.json. Every key except `recipe` and `cost` may be missing or null.

    before_recovery: on held-out images, directly after pruning. bench: one entry per runtime, the dense model first.
    files: bytes of each exported file. dense_sha256: of the dense model's weights. searched: models that the search
    measured. layers: how layers were chosen. extra_epochs: for which the compressed model was trained after the dense
    one. tables: measurements of the methods. manifest: whether manifest.json lists the files of the folder.
    """

    recipe: Required[str]
    summary: str | None
    model: ModelRecord | None
    plan: RecordOf[Plan] | None
    plan_sha256: str | None
    dense_sha256: str | None
    widths: RecordOf[Table] | None
    cost: Required[Mapping[Literal["dense", "compressed"], RecordOf[Cost]]]
    accuracy: AccuracyPair | None
    extra_epochs: int | None
    before_recovery: Mapping[Literal["dense", "pruned"], AccuracyRecord] | None
    recovery: RecoveryRecord | None
    bench: Sequence[BenchRecord] | None
    artifacts: Sequence[ArtifactRecord] | None
    files: Mapping[str, int] | None
    verify: VerificationRecord | None
    folding: Sequence[RecordOf[FoldRecord]] | None
    searched: str | None
    layers: str | None
    teacher: str | None
    published: RecordOf[Published] | None
    tables: Sequence[RecordOf[Table]] | None
    notes: Sequence[str] | None
    manifest: bool | None
