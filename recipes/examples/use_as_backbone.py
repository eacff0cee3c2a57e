"""Use a compressed model as a backbone: extract features, attach another head, train it, and save the result.

    python use_as_backbone.py runs/digits_hetdpt

The folder is a run folder or one that `vc.save_model` wrote. The new task here: is the digit even?
"""

import sys

import numpy as np
import torch
from sklearn.datasets import load_digits

import vitcompress as vc

backbone = vc.load_model(sys.argv[1])  # a timm model
channels, (height, width) = backbone.patch_embed.proj.in_channels, backbone.patch_embed.img_size

digits = load_digits()
pixels = torch.from_numpy(digits.images.astype(np.float32) / 16)[:, None]
images = torch.nn.functional.interpolate(pixels, (height, width)).expand(-1, channels, -1, -1)
even = torch.from_numpy(digits.target % 2 == 0).long()
print("tokens:", tuple(backbone.forward_features(images[:4]).shape))
maps = backbone.forward_intermediates(images[:4], indices=2, intermediates_only=True)
print("feature maps of the last two blocks:", [tuple(m.shape) for m in maps])

backbone.reset_classifier(2)
for name, parameter in backbone.named_parameters():
    parameter.requires_grad = name.startswith("head")  # a linear probe; leave this out to train everything
batches = list(zip(images.split(64), even.split(64), strict=True))
vc.finetune(backbone, batches[:20], batches[20:], epochs=3, lr=1e-2)
print("even or odd:", vc.evaluate(backbone, batches[20:]))

vc.save_model(backbone, "even_digits")
print("exported:", vc.export(backbone, "even_digits/model.onnx"))
