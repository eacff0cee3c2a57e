"""Ten lines of Python that classify one JPEG with an exported file, without vitcompress."""

import math
from collections.abc import Sequence

from vitcompress.bench.report.records import InputRecord

LINES = """\
import json, numpy as np, onnxruntime as ort
from PIL import Image
session = ort.InferenceSession({model!r}, providers=["CPUExecutionProvider"])
classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
image = Image.open({image!r}).convert({mode!r})
image = image.resize({size}, Image.Resampling.{filter})
left, top = round((image.width - {width}) / 2), round((image.height - {height}) / 2)
pixels = np.asarray(image.crop((left, top, left + {width}, top + {height})), np.{type}).reshape({height}, {width}, -1)
images = {images}
print(classes[session.run(None, {{"images": images}})[0].argmax()])
"""
NORMALIZED = "((pixels / 255 - {mean}) / {std}).astype(np.float32).transpose(2, 0, 1)[None]"
BYTES = "pixels[None]"  # for files that normalize uint8 images themselves
MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def snippet(input: InputRecord, model: str = "model.onnx", image: str = "photo.jpg", *, uint8: bool = False) -> str:
    """The ten lines for a model with this input; they preprocess images like timm's evaluation.

    uint8: the file takes uint8 images and normalizes them itself.
    """
    channels, height, width = input["size"]
    scaled = [math.floor(side / input["crop_pct"]) for side in (width, height)]
    return LINES.format(
        model=model,
        image=image,
        mode=MODES.get(channels, "RGB"),
        size=_size(input["crop_mode"], scaled),
        filter=str(input["interpolation"] if input["interpolation"] != "random" else "bilinear").upper(),
        width=width,
        height=height,
        type="uint8" if uint8 else "float32",
        images=BYTES if uint8 else NORMALIZED.format(mean=_values(input["mean"]), std=_values(input["std"])),
    )


def _size(crop_mode: str, scaled: Sequence[int]) -> str:
    """Expression for the size after resizing: exactly `scaled` with `squash`, else the smallest that covers it."""
    width, height = scaled
    if crop_mode == "squash":
        return f"({width}, {height})"
    if width == height:
        return f"[int(side * {width} / min(image.size)) for side in image.size]"
    return f"[round(side / min(image.width / {width}, image.height / {height})) for side in image.size]"


def _values(values: Sequence[float]) -> str:
    return str([float(value) for value in values])
