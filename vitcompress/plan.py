"""A plan is what was removed, as plain data. timm name + plan + weights = the model, anywhere, without pickle."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from vitcompress.errors import PlanError, did_you_mean


def enclosing_module(path: str, modules: Iterable[str]) -> str | None:
    """The first of `modules` that `path` is, or lies in; None where there is none."""
    return next((module for module in modules if f"{path}.".startswith(f"{module}.")), None)


def is_within(path: str, modules: Iterable[str]) -> bool:
    """Whether `path` is one of `modules`, or lies in one of them."""
    return enclosing_module(path, modules) is not None


T = TypeVar("T")

FORMAT = 1
BYPASSES = ("drop", "norm_identity", "double")
ACTIVATION_REPLACEMENTS = ("identity",)
GATE_REPLACEMENTS = ("mean_gate", "drop_gate")
GATED_FFN = (*GATE_REPLACEMENTS, "drop_ffn")
APPENDED = ("gelu",)
RESTORE = "restore plan.json from the run that made it, or run the recipe again"


@dataclass(frozen=True)
class Plan:
    """What stands where in a compressed model.

    arch, arch_args: the dense model, as `timm.create_model(arch, **arch_args)` builds it.
    removed: site -> what stands in its place. Attention: `drop` (x <- x), `norm_identity` (x <- x + norm(x), the
        released HetDPT code), `double` (x <- 2x, the released NOSE code). Activation: `identity`;
        where it gates another branch `mean_gate` (the gate stays at what it computes from its bias) or `drop_gate` (the
        gate is 1). FFN, block: `drop`.
    appended: block -> activation applied to the block's output (`gelu`, released HetDPT, blocks that lost both).
    folded: modules multiplied into a neighbouring linear layer: FFNs (fc1 and fc2 into one) and LayerScales.
    kept: space -> channels, in dense numbers, in order (never sorted: head regrouping permutes).
    heads: attention -> number of heads, where that changed.
    padded: attentions that give q, k and v zeros up to the widest of them, for kernels of one head width.
    standard: `arch` and `args` of the timm model whose sizes the result has, empty where there is none. A statement,
        not an edit: blocks keep their dense numbers, and `standard.standard_state` renumbers them.
    """

    arch: str
    arch_args: Mapping[str, Any] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)
    appended: Mapping[str, str] = field(default_factory=dict)
    folded: tuple[str, ...] = ()
    kept: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    heads: Mapping[str, int] = field(default_factory=dict)
    padded: tuple[str, ...] = ()
    standard: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def __post_init__(self) -> None:
        """Bring the arguments into the form that JSON gives back, so that a plan equals what is read from its file."""
        try:
            arguments = json.loads(json.dumps(dict(self.arch_args)))
        except (TypeError, ValueError) as error:
            raise PlanError(f"arch_args must be plain data, as JSON holds it: {error}") from None
        object.__setattr__(self, "arch_args", arguments)
        object.__setattr__(self, "standard", json.loads(json.dumps(dict(self.standard))))

    def then(self, later: "Plan") -> "Plan":
        """The plan that does this one and then `later`, whose channel numbers count in what this one left.

        What this plan did inside a module that `later` removes is forgotten.

        Raises:
            PlanError: `later` is for another model, or names what this plan removed.
        """
        if (later.arch, later.arch_args) != (self.arch, self.arch_args):
            raise PlanError(f"a plan for {later.arch} cannot follow one for {self.arch} with other arguments")
        lists = dict.fromkeys((*later.folded, *later.padded))
        named = {**later.removed, **later.appended, **later.kept, **later.heads, **lists}
        if again := sorted(name for name in named if is_within(name, self.removed)):
            raise PlanError(f"the second plan names what the first removed: {', '.join(again)}")
        if again := sorted(set(later.folded) & set(self.folded)):
            raise PlanError(f"the second plan folds what the first folded: {', '.join(again)}")
        return replace(
            self,
            removed={**_outside(later.removed, self.removed), **later.removed},
            appended={**_outside(later.removed, self.appended), **later.appended},
            folded=(*_outside(later.removed, dict.fromkeys(self.folded)), *later.folded),
            kept={**_outside(later.removed, self.kept), **_in_dense_numbers(self.kept, later.kept)},
            heads={**_outside(later.removed, self.heads), **later.heads},
            padded=tuple(dict.fromkeys((*_outside(later.removed, dict.fromkeys(self.padded, "")), *later.padded))),
            standard=later.standard or ({} if named else self.standard),
        )

    def to_json(self) -> str:
        """Stable text: equal plans give equal bytes."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["kept"] = {space: list(channels) for space, channels in self.kept.items()}
        if not self.padded:
            del data["padded"]  # plans without it keep the bytes, and so the hash, that they always had
        return json.dumps(data, indent=1, sort_keys=True, default=dict) + "\n"

    @property
    def digest(self) -> str:
        """SHA-256 of the plan's JSON, the plan hash that exported files carry."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read and check a plan. Raises PlanError with every problem that needs no model to be seen."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"the plan is not JSON: {error}", hint=RESTORE) from None
        problems = _problems(data)
        if problems:
            raise PlanError("the plan cannot be used:\n  " + "\n  ".join(problems), hint=RESTORE)
        data["kept"] = {space: tuple(channels) for space, channels in data.get("kept", {}).items()}
        data |= {key: tuple(data.get(key, ())) for key in ("folded", "padded")}
        return cls(**data)


def _outside(removed: Mapping[str, str], entries: Mapping[str, T]) -> dict[str, T]:
    return {name: value for name, value in entries.items() if not is_within(name, removed)}


def _in_dense_numbers(
    before: Mapping[str, tuple[int, ...]], later: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """`later`, whose numbers count within `before`, in the numbers that `before` counts in."""
    found: dict[str, tuple[int, ...]] = {}
    for space, channels in later.items():
        left = before.get(space)
        if left is not None and not all(0 <= c < len(left) for c in channels):
            raise PlanError(f"kept.{space}: the first plan left {len(left)} channels, the second counts beyond them")
        found[space] = tuple(channels) if left is None else tuple(left[c] for c in channels)
    return found


def _problems(data: Any) -> list[str]:
    """What is wrong with plan data, one sentence each."""
    if not isinstance(data, dict):
        return [f"expected an object, got {type(data).__name__}"]
    known = {f.name: f for f in fields(Plan)}
    found = [f"{key}: unknown key{did_you_mean(key, known)}" for key in data if key not in known]
    if data.get("format") != FORMAT:
        found.append(f"format: got {data.get('format')!r}, this version reads {FORMAT}")
    if not isinstance(data.get("arch"), str):
        found.append(f"arch: expected a timm model name, got {data.get('arch')!r}")
    found += [
        f"{key}: expected an object, got {type(data[key]).__name__}"
        for key in ("arch_args", "removed", "appended", "kept", "heads", "standard")
        if key in data and not isinstance(data[key], dict)
    ]
    for key in ("folded", "padded"):
        if not _is_list_of(data.get(key, []), str):
            found.append(f"{key}: expected a list of module names")
    return found or _value_problems(data)


def _value_problems(data: dict[str, Any]) -> list[str]:
    allowed = (*BYPASSES, *ACTIVATION_REPLACEMENTS, *GATE_REPLACEMENTS)
    found = [
        f"removed.{site}: got {stand!r}, allowed: {', '.join(allowed)}"
        for site, stand in data.get("removed", {}).items()
        if stand not in allowed
    ]
    found += [
        f"appended.{block}: got {act!r}, allowed: {', '.join(APPENDED)}"
        for block, act in data.get("appended", {}).items()
        if act not in APPENDED
    ]
    for space, channels in data.get("kept", {}).items():
        if not _is_list_of(channels, int) or not are_valid_channels(channels):
            found.append(f"kept.{space}: expected one or more distinct channel numbers, got {str(channels)[:60]}")
    found += [
        f"heads.{name}: expected a whole number from 1, got {count!r}"
        for name, count in data.get("heads", {}).items()
        if not _is_list_of([count], int) or count < 1
    ]
    standard = data.get("standard", {})
    if standard and not (isinstance(standard.get("arch"), str) and isinstance(standard.get("args"), dict)):
        found.append(f"standard: expected arch and args of a timm model, got {str(standard)[:60]}")
    for key in ("folded", "padded"):
        if len(set(data.get(key, []))) != len(data.get(key, [])):
            found.append(f"{key}: a module is named twice")
    return found


def check_bypasses(attention_bypass: str, both_pruned_output_act: str, gated_ffn: str = "mean_gate") -> None:
    """Raise PlanError unless all name a choice that there is."""
    if gated_ffn not in GATED_FFN:
        raise PlanError(f"gated_ffn must be one of {', '.join(GATED_FFN)}, got {gated_ffn!r}")
    if attention_bypass not in BYPASSES:
        raise PlanError(f"attention_bypass must be one of {', '.join(BYPASSES)}, got {attention_bypass!r}")
    if both_pruned_output_act not in (*APPENDED, "none"):
        raise PlanError(
            f"both_pruned_output_act must be one of {', '.join(APPENDED)}, none; got {both_pruned_output_act!r}"
        )


def are_valid_channels(channels: Sequence[int]) -> bool:
    """Whether these can be kept: at least one, none twice, none negative."""
    return len(set(channels)) == len(channels) and min(channels, default=-1) >= 0


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)
