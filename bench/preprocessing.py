"""Preprocessing for files that do not record it: options of the user, completed with timm's defaults.

A file that takes uint8 images normalizes them itself; only size, interpolation and crop are open for it.
"""

from collections.abc import Mapping

import numpy as np
from timm.data import resolve_data_config

from vitcompress.errors import ArtifactError
from vitcompress.exporters.runtimes import Runner
from vitcompress.io.text import describe_value
from vitcompress.models.create import InputConfig
from vitcompress.models.preprocessing import NAMES, Preprocessing, Value

CHANNELS = (1, 3)  # of images that can be read from a data set


def resolve_preprocessing(runner: Runner, options: Preprocessing) -> tuple[InputConfig, str]:
    """The preprocessing of `runner`, and a sentence on what was assumed if its artifact does not record it.

    For uint8 input mean is 0 and std is 1: the runner then passes on the bytes of the image. Raises ArtifactError if
    mean and std are unknown, the options contradict the artifact, or the last dimension of uint8 input cannot be
    channels, and InputError if the number of values is neither 1 nor the number of channels.
    """
    values = options.changes_for(runner.input_size[0], runner.name)
    if runner.input is not None:
        _check_equal(runner.name, runner.input, values)
        return runner.input, ""
    channels, height, width = runner.input_size
    fixed: dict[str, Value] = {}
    if runner.takes_bytes:
        if channels not in CHANNELS:
            problem = f"{runner.name} takes uint8 input of {height} x {width} x {channels}"
            hint = "give a file that takes batch x height x width x channels (insert a Transpose before this model)"
            raise ArtifactError(f"{problem}, which is no image with channels last", hint=hint)
        fixed = {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    elif not {"mean", "std"} <= values.keys():
        hint = "pass --mean and --std, export it with vitcompress, or evaluate the run folder"
        raise ArtifactError(f"{runner.name} does not record its preprocessing (mean, std, crop)", hint=hint)
    config = resolve_data_config({"input_size": runner.input_size, **values, **fixed})
    used = {name: value for name, value in values.items() if name not in fixed}
    unused = [f"--{name}" for name in values if name in fixed]
    assumed = {name: config[name] for name in NAMES if name not in {*values, *fixed}}
    remarks = (
        f"{runner.name} does not record its preprocessing",
        "it takes uint8 images and normalizes them itself" if fixed else "",
        f"{' and '.join(unused)} {'have' if len(unused) > 1 else 'has'} no effect on it" if unused else "",
        f"used: {_format(used)}" if used else "",
        f"assumed, timm's defaults: {_format(assumed)}" if assumed else "",
    )
    return InputConfig(size=config.pop("input_size"), **config), "; ".join(filter(None, remarks))


def _check_equal(name: str, config: InputConfig, values: Mapping[str, Value]) -> None:
    """Raise ArtifactError for an option that differs from what the artifact records."""
    for key, value in values.items():
        own: Value = getattr(config, key)
        if own != value and (isinstance(value, str) or not np.allclose(own, value, rtol=1e-9, atol=0)):
            hint = f"leave --{key.replace('_', '-')} out: the artifact was exported with the value that it records"
            raise ArtifactError(f"{name} records {key} {describe_value(own)}, not {describe_value(value)}", hint=hint)


def _format(values: Mapping[str, Value]) -> str:
    """`mean 0.5,0.5,0.5, crop_pct 0.9`"""
    return ", ".join(f"{key} {describe_value(value)}" for key, value in values.items())
