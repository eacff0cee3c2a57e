"""A plan states what was removed from a model, as plain data: timm name + plan + weights rebuild the model."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import index
from typing import Any

from vitcompress.errors import PlanError, did_you_mean


def enclosing_module(path: str, modules: Iterable[str]) -> str | None:
    """The first of `modules` that is, or contains, the module `path`; None without such a module."""
    return next((module for module in modules if f"{path}.".startswith(f"{module}.")), None)


def is_within(path: str, modules: Iterable[str]) -> bool:
    """Whether `path` is one of `modules` or inside one of them."""
    return enclosing_module(path, modules) is not None


def module_of(space: str) -> str:
    """Path of the module that contains the space: `blocks.1.attn` for `blocks.1.qk`, itself for `blocks.1.mlp`."""
    block, _, kind = space.rpartition(".")
    return f"{block}.attn" if kind in ("qk", "v", "sr") else space


def stage_of(block: str) -> str:
    """The module that contains a block."""
    return block.rpartition(".")[0]


Channels = Mapping[str, tuple[int, ...]]  # space -> numbers of its channels
FORMAT = 1
BYPASSES = ("drop", "norm_identity", "double")
ACTIVATION_REPLACEMENTS = ("identity",)
GATE_REPLACEMENTS = ("mean_gate", "drop_gate")
ALLOWED = {"attention": BYPASSES, "activation": ACTIVATION_REPLACEMENTS, "ffn": ("drop",), "block": ("drop",)}
REPLACEMENTS = (*BYPASSES, *ACTIVATION_REPLACEMENTS, *GATE_REPLACEMENTS)
APPENDED = ("gelu",)
MAPPINGS = ("arch_args", "removed", "appended", "kept", "heads", "standard", "follows")  # keys of a plan
LISTS = ("folded", "padded")
AS_BEFORE = "use a plan on the model that it was computed for, as it was then"
RESTORE = "restore plan.json from the run that wrote it, or run the recipe again"


@dataclass(frozen=True)
class Plan:
    """What a compressed model lacks, and what replaces it. All names are those of the dense model.

    arch, arch_args: the dense model is `timm.create_model(arch, **arch_args)`.
    removed: site -> replacement. Attention: `drop` (x <- x), `norm_identity` (x <- x + norm(x), the released HetDPT
        code), `double` (x <- 2x, the released NOSE code). Activation: `identity`; an activation that gates another
        branch: `mean_gate` (the gate is constant, computed from its bias) or `drop_gate` (the gate is 1). FFN and
        block: `drop`.
    appended: block -> activation applied to the block's output (`gelu`: released HetDPT, blocks that lost both).
    folded: modules multiplied into a neighboring linear layer: FFNs (fc1 and fc2 become one layer) and LayerScales.
    kept: space -> channels of the dense model, ordered (never sorted: UP-ViT regroups heads by permutation). The
        spaces of the attention `BLOCK.attn` are `BLOCK.qk`, `BLOCK.v` and `BLOCK.sr`.
    heads: attention -> number of heads, where it changed.
    padded: attentions that pad q, k and v with zeros to the widest of them, for kernels of one head width.
    standard: `arch` and `args` of the timm model with the same sizes; empty if there is none. It edits nothing: blocks
        keep their dense numbers, and `models.standard` renumbers them.
    follows: space in `kept` -> hash of the channels that its numbers count. `vc.plan` sets it, `vc.prune` compares it.
    """

    arch: str
    arch_args: Mapping[str, object] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)
    appended: Mapping[str, str] = field(default_factory=dict)
    folded: tuple[str, ...] = ()
    kept: Channels = field(default_factory=dict)
    heads: Mapping[str, int] = field(default_factory=dict)
    padded: tuple[str, ...] = ()
    standard: Mapping[str, Any] = field(default_factory=dict)
    follows: Mapping[str, str] = field(default_factory=dict, compare=False)
    format: int = FORMAT

    def __post_init__(self) -> None:
        """Convert arguments to what JSON returns (lists, numbers of Python): a plan equals the plan in its file."""
        try:
            tables = {key: dict(getattr(self, key)) for key in MAPPINGS}
            kept = {str(space): tuple(map(index, channels)) for space, channels in tables.pop("kept").items()}
            heads = {str(name): index(count) for name, count in tables.pop("heads").items()}
            lists = {key: tuple(map(str, getattr(self, key))) for key in LISTS}
            plain = json.loads(json.dumps(tables, default=index))  # of NumPy's integers
        except (TypeError, ValueError) as error:
            message = "a plan consists of tables and lists of plain data (JSON), kept and heads of whole numbers"
            raise PlanError(f"{message}: {error}") from None
        vars(self).update(plain, kept=kept, heads=heads, **lists)

    def delta(self, **edits: Any) -> "Plan":
        """A plan for the same dense model with only these edits: `plan.delta(removed={"blocks.1.attn": "drop"})`."""
        return Plan(self.arch, self.arch_args, **edits)

    def then(self, later: "Plan") -> "Plan":
        """The composition: this plan, then `later`, whose channels are indices into those that this plan keeps.

        Edits of this plan inside a module that `later` removes are dropped. Raises PlanError if `later` is for another
        model, or names what this plan removed.
        """
        if (later.arch, later.arch_args) != (self.arch, self.arch_args):
            own, new = self.arch_args, later.arch_args
            names = ", ".join(name for name in {**own, **new} if own.get(name) != new.get(name))
            arguments = f" with other arguments ({names})" if names else ""
            raise PlanError(f"a plan for {later.arch} cannot follow one for {self.arch}{arguments}", hint=AS_BEFORE)
        lists = dict.fromkeys((*later.folded, *later.padded))
        named = {**later.removed, **later.appended, **later.kept, **later.heads, **lists}
        if again := sorted(name for name in named if is_within(module_of(name), self.removed)):
            raise PlanError(f"the second plan names what the first removed: {', '.join(again)}", hint=AS_BEFORE)
        if again := sorted(set(later.folded) & set(self.folded)):
            raise PlanError(f"the second plan folds what the first folded: {', '.join(again)}", hint=AS_BEFORE)

        channels = _to_dense_channels(self.kept, later.kept)
        merged: dict[str, object] = {}  # entries of both plans, this plan's only outside of the removed modules
        for name in ("removed", "appended", "kept", "heads", *LISTS):
            own, new = getattr(self, name), channels if name == "kept" else getattr(later, name)
            left = [key for key in own if not is_within(module_of(key), later.removed)]
            both = dict.fromkeys((*left, *new))
            merged[name] = tuple(both) if name in LISTS else {key: new.get(key, own.get(key)) for key in both}
        return self.delta(**merged, standard=later.standard or ({} if named else self.standard))

    def kept_digests(self, later: "Plan") -> dict[str, str]:
        """Space in `later.kept` -> hash of the channels that this plan keeps of it, which `later` numbers."""
        return {space: Plan("", kept={space: self.kept.get(space, ())}).digest[:16] for space in later.kept}

    def to_json(self) -> str:
        """Canonical text: equal plans give equal bytes, except for `follows`."""
        # These keys are newer than the format: plans without them keep their hash.
        data = {key: value for key, value in vars(self).items() if key not in ("padded", "follows") or value}
        return json.dumps(data, indent=1, sort_keys=True) + "\n"

    @property
    def digest(self) -> str:
        """SHA-256 of `to_json` without `follows`: the plan hash that exported files record."""
        return hashlib.sha256(replace(self, follows={}).to_json().encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read and validate a plan. Raises PlanError with all problems that can be detected without the model."""
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:  # TypeError: it is no text
            raise PlanError(f"the plan is not JSON: {error}", hint=RESTORE) from None
        if problems := plan_problems(data):
            raise PlanError("the plan cannot be used:\n  " + "\n  ".join(problems), hint=RESTORE)
        return cls(**data)


def _to_dense_channels(before: Channels, later: Channels) -> dict[str, tuple[int, ...]]:
    """`later`, indices into the channels of `before`, as channels of the dense model."""
    dense: dict[str, tuple[int, ...]] = {}
    for space, channels in later.items():
        left = before.get(space)
        if left is not None and not all(0 <= c < len(left) for c in channels):
            raise PlanError(f"kept.{space} counts beyond the {len(left)} channels of the first plan", hint=AS_BEFORE)
        dense[space] = tuple(channels) if left is None else tuple(left[c] for c in channels)
    return dense


def plan_problems(data: Any) -> list[str]:
    """Problems of the data of a plan that can be detected without the model, one sentence each."""
    if not isinstance(data, dict):
        return [f"expected an object, got {type(data).__name__}"]
    known = [f.name for f in fields(Plan)]
    problems = [f"{key}: unknown key{did_you_mean(key, known)}" for key in data if key not in known]
    if data.get("format") != FORMAT:
        problems.append(f"format: got {data.get('format')!r}, this version reads {FORMAT}")
    if not isinstance(data.get("arch"), str):
        problems.append(f"arch: expected a timm model name, got {data.get('arch')!r}")
    for key in MAPPINGS:
        if not isinstance(data.get(key, {}), dict):
            problems.append(f"{key}: expected an object, got {type(data[key]).__name__}")
    problems += [f"{key}: expected a list of module names" for key in LISTS if not _is_list_of(data.get(key, []), str)]
    return problems or _value_problems({**{key: {} for key in MAPPINGS}, **dict.fromkeys(LISTS, ()), **data})


def _value_problems(data: Any) -> list[str]:
    problems = [
        f"{key}.{name}: got {value!r}, allowed: {', '.join(allowed)}"
        for key, allowed in (("removed", REPLACEMENTS), ("appended", APPENDED))
        for name, value in data[key].items()
        if value not in allowed
    ]
    for space, channels in data["kept"].items():
        distinct = _is_list_of(channels, int) and len(set(channels)) == len(channels)
        if not distinct or min(channels, default=-1) < 0:
            problems.append(f"kept.{space}: expected one or more distinct channel numbers, got {str(channels)[:60]}")
    for name, count in data["heads"].items():
        if not _is_list_of([count], int) or count < 1:
            problems.append(f"heads.{name}: expected a whole number from 1, got {count!r}")
    standard = data["standard"]
    if standard and not (isinstance(standard.get("arch"), str) and isinstance(standard.get("args"), dict)):
        problems.append(f"standard: expected arch and args of a timm model, got {str(standard)[:60]}")
    return problems + [f"{key}: a module is named twice" for key in LISTS if len(set(data[key])) != len(data[key])]


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)
