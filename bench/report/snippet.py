"""A few lines of Python that classify one JPEG with an exported file; they need its runtime, numpy and pillow alone."""

import math
from collections.abc import Sequence

from vitcompress.bench.report.records import ArtifactRecord, RecordOf
from vitcompress.exporters.openvino.runner import HINTS
from vitcompress.models.create import InputConfig

ONNX = """\
import json, numpy as np, onnxruntime as ort
from PIL import Image
session = ort.InferenceSession({model!r}, providers=[{providers}])
classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
{load}
print(classes[session.run(None, {{"images": images}})[0].argmax()])
"""
OPENVINO = """\
import json, numpy as np, openvino
from PIL import Image
model = openvino.Core().read_model({model!r})
classes = json.loads(model.get_rt_info(["vitcompress", "classes"]).value)
{load}
{reshape}run = openvino.Core().compile_model(model, "CPU", {{"INFERENCE_PRECISION_HINT": {precision!r}}})
print(classes[run(images)[0].argmax()])
"""
# CUDA's driver is on every machine with a GPU; its managed memory is shared by the CPU and the GPU.
ENGINE = """\
import ctypes, json, numpy as np, {library} as trt
from PIL import Image
cuda, primary = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert cuda.cuInit(0) == cuda.cuDevicePrimaryCtxRetain(ctypes.byref(primary), 0) == cuda.cuCtxSetCurrent(primary) == 0
runtime = trt.Runtime(trt.Logger())
engine = runtime.deserialize_cuda_engine(open({model!r}, "rb").read())
classes = json.loads(json.load(open({model!r} + ".json"))["metadata"]["classes"])
{load}
run, arrays = engine.create_execution_context(), {{}}
run.set_input_shape("images", images.shape)
for name in map(engine.get_tensor_name, range(engine.num_io_tensors)):
    pointer, like = ctypes.c_uint64(), np.empty(run.get_tensor_shape(name), trt.nptype(engine.get_tensor_dtype(name)))
    assert cuda.cuMemAllocManaged(ctypes.byref(pointer), ctypes.c_size_t(like.nbytes), 1) == 0
    memory = (ctypes.c_byte * like.nbytes).from_address(pointer.value)
    arrays[name] = np.frombuffer(memory, like.dtype).reshape(like.shape)
    run.set_tensor_address(name, pointer.value)
arrays["images"][:] = images
assert run.execute_async_v3(0) and cuda.cuCtxSynchronize() == 0
print(classes[arrays["logits"][0].argmax()])
"""
LOAD = """\
image = Image.open({image!r}).convert({mode!r})
image = image.resize({size}, Image.Resampling.{filter})
left, top = round((image.width - {width}) / 2), round((image.height - {height}) / 2)
pixels = np.asarray(image.crop((left, top, left + {width}, top + {height})), np.{type}).reshape({height}, {width}, -1)
images = {images}"""
TEMPLATES = {"onnx": ONNX, "openvino": OPENVINO, "trt": ENGINE, "trt-rtx": ENGINE}
NORMALIZED = "((pixels / 255 - {mean}) / {std}).astype(np.float32).transpose(2, 0, 1)[None]"
BYTES = "pixels[None]"  # for files that normalize uint8 images themselves


def snippet(input: RecordOf[InputConfig], artifact: ArtifactRecord, image: str = "photo.jpg") -> str:
    """The lines for one exported file of a model with this input; they preprocess images like timm's evaluation."""
    channels, height, width = input["size"]
    scaled = [math.floor(side / input["crop_pct"]) for side in (width, height)]
    uint8, kind = artifact.get("input") == "uint8", artifact.get("format", "onnx")
    least = (artifact.get("batch") or [1])[0]
    images = BYTES if uint8 else NORMALIZED.format(mean=[*map(float, input["mean"])], std=[*map(float, input["std"])])
    load = LOAD.format(
        image=image,
        mode="L" if channels == 1 else "RGB",
        size=_size(input["crop_mode"], scaled),
        filter=input["interpolation"].upper(),
        width=width,
        height=height,
        type="uint8" if uint8 else "float32",
        images=images if least == 1 else f"np.repeat({images}, {least}, 0)",  # the smallest batch of an engine
    )
    return TEMPLATES[kind].format(
        model=artifact["file"],
        load=load,
        # ONNX Runtime has no kernels for bf16 on the CPU.
        providers='"CUDAExecutionProvider"' if artifact["precision"] == "bf16" else '"CPUExecutionProvider"',
        precision=HINTS[artifact["precision"]] if kind == "openvino" else None,
        reshape="" if artifact.get("variable_batch") else "model.reshape(images.shape)\n",
        library="tensorrt" if kind == "trt" else "tensorrt_rtx",
    )


def _size(crop_mode: str, scaled: Sequence[int]) -> str:
    """Expression for the size after resizing: exactly `scaled` with `squash`, else the smallest that covers it."""
    width, height = scaled
    if crop_mode == "squash":
        return f"({width}, {height})"
    if width == height:
        return f"[int(side * {width} / min(image.size)) for side in image.size]"
    return f"[round(side / min(image.width / {width}, image.height / {height})) for side in image.size]"
