"""The dense model that a recipe describes: architecture arguments, preprocessing and class names, each with its source.

Weights of a user are rarely of the architecture's default size. What their shapes, the options of the training script
and a config.json state becomes arguments of `timm.create_model`, so a plan rebuilds the model without that file.
"""

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import timm
from torch import nn

from vitcompress.errors import InputError, WeightsError
from vitcompress.io.files import decode_json_values, read_json, read_text
from vitcompress.io.text import describe_value, join_names
from vitcompress.models import create
from vitcompress.models.arguments import Shapes, base_of, describe_shapes, read_arguments, shapes_of
from vitcompress.models.preprocessing import NAMES, Preprocessing
from vitcompress.models.weights import HUB, NOT_FILES, WeightFile, open_weights, parse_class_names

Arguments = Mapping[str, object]  # of `timm.create_model`
Sourced = tuple[dict[str, Any], dict[str, str]]  # values by name, and the source of each
POSITIONS = re.compile("^pos_embed$|relative_position_bias_table$")
# Arguments whose other values may give equal shapes -> what the rules then read otherwise.
AMBIGUOUS = {"img_size": ("img_size", "no_embed_class"), "global_pool": ("global_pool",), "fc_norm": ("global_pool",)}
DEFAULT = "timm's default"
ASSUMED = f"assumed: {DEFAULT}, not visible in the weights"
SQUARE = "assumed: square images, no position of class tokens; for others, set model.args.img_size"
RECIPE, WEIGHTS = "model.args", "the weights"
FROM_RECIPE, USER = "the recipe", "the user"
CLASSES_HINT = "--classes takes one name per line, or JSON: a list in the order of the outputs, or class_to_idx"


@dataclass(frozen=True)
class Setting:
    """A value that the dense model depends on, and what it comes from: `the weights`, `model.args`, `timm's default`"""

    name: str
    value: object
    source: str


def list_by_source(settings: Iterable[Setting]) -> dict[str, str]:
    """Source -> the settings from there, as text."""
    return join_names((setting.source, f"{setting.name} {describe_value(setting.value)}") for setting in settings)


@dataclass(frozen=True)
class ResolvedModel:
    """Arguments of `create_model`, and why.

    arch_args: those of the recipe, and what differs from timm's defaults. Preprocessing and class names are in timm's
    `pretrained_cfg_overlay`, so they are part of the plan. settings: everything that the model depends on, to show.
    class_names: of the weights, or of the user; empty if unknown. part: the key of the checkpoint. weights: on the hub
    with the revision.
    """

    arch: str
    arch_args: dict[str, object]
    weights: str
    settings: tuple[Setting, ...] = ()
    class_names: tuple[str, ...] = ()
    part: str | None = None


def resolve_model(
    arch: str,
    args: Arguments,
    weights: str | Path = "random",
    *,
    preprocessing: Mapping[str, Preprocessing] | None = None,
    classes: int | None = None,
    class_names: Sequence[str] = (),
) -> ResolvedModel:
    """Complete the arguments of a recipe with what its weights state.

    args: of the recipe; they decide what the weights leave open. preprocessing: source -> its values, of which the
    last ones count. classes: number of classes of the data; None: that of the weights. class_names: the user's. Raises
    InputError if timm cannot build the model, or `class_names` has another length, and WeightsError for weights that
    cannot be read, contradict `args`, or are of another architecture.
    """
    if arch.startswith(HUB):
        arch, weights = "", arch if str(weights) == "hub" else weights
    file = WeightFile() if str(weights) in NOT_FILES else open_weights(weights)
    arch = arch or str(file.stated.get("model", ""))
    if not arch and str(weights) not in NOT_FILES:
        raise InputError(f"{weights} does not name a timm architecture", hint=f"use --model NAME --weights {weights}")
    create.check_arguments(arch, args)
    own = {name: value for name, value in args.items() if name != create.OVERLAY}
    overlay: dict[str, Any] = dict(args.get(create.OVERLAY) or {})  # type: ignore[call-overload]
    chosen, sources = _arguments(arch, own, file, weights)
    if classes:
        chosen["num_classes"], sources["num_classes"] = classes, "the data"
    blank = _create(arch, chosen, overlay, sources)
    size = file.stated.get("img_size")
    if "input_size" in overlay:
        sources["img_size"] = RECIPE
    elif size and "img_size" not in sources:  # PVTv2 has no such argument
        channels, *sides = create.input_config(blank).size
        if _as_list(size) != sides:
            overlay["input_size"], sources["img_size"] = [channels, *_as_list(size)], file.stated_in
            blank = _create(arch, chosen, overlay, sources)
    if not own.keys() & {"img_size", "window_size"}:
        hub = create_blank(arch, {}).state_dict() if str(weights) == "hub" else {}
        _check_positions(shapes_of(file.tensors or hub), shapes_of(blank.state_dict()), weights)
    values, value_sources = _preprocessing(arch, blank, file, overlay, preprocessing or {})
    overlay |= _differing(values, vars(create.input_config(blank)))
    if class_names:
        create.check_class_count(class_names, blank)
    elif len(file.class_names) == getattr(blank, "num_classes", None):
        class_names = file.class_names
    names = tuple(class_names) or create.class_names_of(blank)
    sources |= {"model": FROM_RECIPE, **value_sources}
    facts = _facts(blank)
    settings = tuple(  # `chosen` counts: shapes do not show the initial values of LayerScales
        Setting(name, value, sources.get(name, DEFAULT).replace(DEFAULT, f"{DEFAULT} for {arch}"))
        for name, value in {"model": arch, **facts, **chosen, "img_size": facts["img_size"], **values}.items()
    )
    complete = create.with_class_names({**chosen, create.OVERLAY: overlay}, names)
    return ResolvedModel(arch, complete, file.weights or str(weights), settings, names, file.part)


def _preprocessing(
    arch: str, blank: nn.Module, file: WeightFile, overlay: Arguments, preprocessing: Mapping[str, Preprocessing]
) -> Sourced:
    """The preprocessing of `blank`, and the source of each value. Those of `preprocessing` count most."""
    config, stated = create.input_config(blank), file.stated
    trained = str(stated.get("model", arch))
    known = trained if timm.is_model_pretrained(trained) else trained.split(".")[0]  # timm may lack the tag
    if known.split(".")[0] != arch.split(".")[0] and (other := timm.get_pretrained_cfg(known)):
        stated = {**other.to_dict(), **stated}  # a training script that names another model uses its defaults
    tables: dict[str, Mapping[str, Any]] = {DEFAULT: vars(config), file.stated_in: stated, RECIPE: overlay}
    tables |= {source: table.changes_for(config.size[0], arch) for source, table in preprocessing.items()}
    return _merge({source: {name: table[name] for name in NAMES if name in table} for source, table in tables.items()})


def _create(arch: str, args: Arguments, overlay: Arguments, sources: Mapping[str, str]) -> nn.Module:
    """`create_blank`. Raises InputError, with how to set the number of heads if an assumed one does not work."""
    assumed = sources.get("num_heads") == ASSUMED
    try:
        blank = create_blank(arch, {**args, create.OVERLAY: overlay} if overlay else args)
        if assumed and int(getattr(blank, "num_classes", 0)):
            create.check_classifier(arch, args, blank)  # timm builds Eva with any number of heads
    except InputError as error:
        if not assumed:
            raise
        hint = "set the number of heads, which weights do not show: --set model.args.num_heads=4 (Python: num_heads=4)"
        raise InputError(error.message, hint=hint) from None
    return blank


def _merge(layers: Mapping[str, Mapping[str, Any]]) -> Sourced:
    """The values of `layers`, by their source, of which the last one counts, as JSON, and the source of each value."""
    values = {name: value for table in layers.values() for name, value in table.items()}
    return json.loads(json.dumps(values)), {name: source for source, table in layers.items() for name in table}


def _arguments(arch: str, own: Arguments, file: WeightFile, weights: str | Path) -> Sourced:
    """Arguments of timm that are not its defaults, and the source of each. Raises WeightsError.

    There are three sources. own: the recipe. `stated`: what the file says. `seen`: what the shapes of its weights show,
    which counts more than what is stated. A value of the recipe that one of them contradicts is an error, but for the
    size of images and the number of classes, which the recipe may change.
    """
    if not file.tensors:
        return dict(own), dict.fromkeys(own, RECIPE)
    try:
        default, fits = create_blank(arch, own), True
    except InputError:  # these arguments may fit only the sizes that the weights show
        default, fits = create_blank(arch, {}), False
    base, shapes = base_of(type(default)), shapes_of(file.tensors)
    known = inspect.signature(base).parameters if base else {}
    stated = {name: value for name, value in file.stated.items() if name in known}
    seen = {} if base is None else _read_shapes(arch, base, shapes, stated, own)
    evidence, sources = _merge({file.stated_in: stated, WEIGHTS: seen})
    built = {name: getattr(default, name, None) for name in stated} | _facts(default)  # arguments of the built model
    built |= {} if fits else {name: value for name, value in seen.items() if name in own}
    left_open = {name: value for name, value in evidence.items() if name not in own}
    new = _differing(left_open, built)
    kind, similar = describe_shapes(shapes)
    has_other_blocks = base and kind and not seen.keys() & {"depth", "depths"}
    has_other_heads = ("dist_token" in shapes) != hasattr(default, "dist_token")
    has_other_width = similar is not None and "embed_dim" in new
    if has_other_blocks or has_other_heads or has_other_width:
        message = f"{weights} contains {kind or 'an unknown architecture'}; the recipe's model is {arch}"
        raise WeightsError(message, hint=f"use --model {file.stated.get('model', similar or 'NAME')}, or other weights")
    with suppress(InputError):  # raised again by `_create`
        built |= _facts(create_blank(arch, {**new, **own}))
    new |= _differing(left_open, built)
    # What shapes show is compared with those of the model with all these arguments, all else with the recipe; heads,
    # too: their number must fit the other arguments, or timm cannot build that model.
    expected = {**own, **{name: built.get(name) for name in seen if name != "num_heads"}}
    if wrong := sorted(own.keys() & _differing(evidence, expected).keys() - {"img_size", "num_classes"}):
        texts = (f"{name} is {evidence[name]} in {sources[name]}, {own[name]} in {RECIPE}" for name in wrong)
        hint = "leave it out of model.args, or use --model NAME, which starts without arguments"
        raise WeightsError(f"{weights} contradicts the recipe: {'; '.join(texts)}", hint=hint)
    if new.get("no_embed_class") and sources["no_embed_class"] == WEIGHTS and "img_size" not in own:
        sources |= dict.fromkeys(("no_embed_class", "img_size"), SQUARE)  # the positions of others may be as many
    return {**new, **own}, {"num_heads": ASSUMED, **sources, **dict.fromkeys(own, RECIPE)}


def _differing(values: Arguments, facts: Arguments) -> dict[str, Any]:
    """Those of `values` that are not those in `facts`."""
    return {name: value for name, value in values.items() if _as_list(value) != _as_list(facts.get(name))}


def _read_shapes(arch: str, base: Any, shapes: Shapes, stated: Arguments, own: Arguments) -> dict[str, object]:
    """The arguments that `shapes` show, without those that a stated one explains otherwise (`AMBIGUOUS`)."""
    seen = read_arguments(base, shapes)
    unsure = {name for argument, names in AMBIGUOUS.items() if argument in {**stated, **own} for name in names}
    certain = {name: value for name, value in seen.items() if name not in unsure}
    known = inspect.signature(base).parameters
    try:
        blank = create_blank(arch, {n: v for n, v in {**certain, **stated, **own}.items() if n in known})
    except InputError:  # timm cannot build what is stated
        return seen
    if read_arguments(base, shapes_of(blank.state_dict())) != seen:
        return seen
    facts = _facts(blank)
    return {n: v for n, v in seen.items() if n in certain or (n not in stated and v == facts[n])}


def _check_positions(shapes: Shapes, model: Shapes, weights: str | Path) -> None:
    """Raise WeightsError if `model` has position tables of another size than the weights."""
    for name in sorted(name for name in model.keys() & shapes.keys() if POSITIONS.search(name)):
        old, new = shapes[name], model[name]
        if old != new and old[-1:] == new[-1:]:
            hint = "set the image size of the training, as in --set model.args.img_size=[48,96]"
            change = f"{name} from {old} to {new} would be resampled"
            raise WeightsError(f"the image size of {weights} is unknown: {change}", hint=hint)


def _facts(blank: nn.Module) -> dict[str, object]:
    """The arguments of a model that its weights can contradict."""
    heads = [
        next((int(module.num_heads) for module in stage.modules() if hasattr(module, "num_heads")), 0)
        for stage in getattr(blank, "layers", None) or getattr(blank, "stages", None) or [blank]
    ]
    shown = read_arguments(base_of(type(blank)), shapes_of(blank.state_dict()))
    shown |= {n: getattr(blank, n, None) for names in AMBIGUOUS.values() for n in names if n in shown}
    size = [*dict.fromkeys(create.input_config(blank).size[1:])]
    return {"num_heads": heads if len(heads) > 1 else heads[0], **shown, "img_size": size if len(size) > 1 else size[0]}


def _as_list(value: Any) -> list[Any]:
    """A value of an argument with one entry per side: 48 means the same as (48, 48)."""
    return list(value) if isinstance(value, list | tuple) else [value] * 2


def load_class_names(path: Path) -> tuple[str, ...]:
    """The class names in a text file, one per line, or in a JSON list or table. Raises InputError."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "it is no UTF-8 text")
        raise InputError(f"{path} cannot be read: {reason}", hint=CLASSES_HINT) from None
    is_json = text.lstrip().startswith(("[", "{"))
    names: Any = read_json(path) if is_json else [line.strip() for line in text.rstrip().splitlines()]
    if isinstance(names, dict):
        names = parse_class_names([{"classes": names}])
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InputError(f"{path} contains an empty line, or no names", hint=CLASSES_HINT)
    return tuple(names)


def create_named(text: str, weights: str | Path = "random", classes: int | None = None) -> nn.Module:
    """The model `NAME` or `NAME?img_size=48&depth=2`, with arguments of timm, completed by `resolve_model`.

    classes: number of classes; None: that of the weights. Raises as `resolve_model` and `create_model`.
    """
    name, _, query = text.partition("?")
    args = decode_json_values(dict(parse_qsl(query, keep_blank_values=True)))
    resolved = resolve_model(name, args, weights, classes=classes)
    if getattr(blank := create_blank(resolved.arch, resolved.arch_args), "num_classes", 0):
        create.check_classifier(resolved.arch, resolved.arch_args, blank)
    return create.create_model(resolved.arch, resolved.arch_args, resolved.weights)


def create_blank(arch: str, args: Arguments) -> nn.Module:
    """`create_on_meta`, once for equal arguments."""
    return _blank(arch, json.dumps(args))


@lru_cache(maxsize=8)  # lists of recipes and the rows of a study use few architectures
def _blank(arch: str, args: str) -> nn.Module:
    return create.create_on_meta(arch, json.loads(args))
