"""Compress your own checkpoint: prune, fine-tune with the dense model as teacher, export, verify, measure.

    python compress_checkpoint.py --model vit_small_patch16_224 --weights mine.pth --data /data/flowers --classes 102

The data folder has train/CLASS/* and val/CLASS/*.
"""

import argparse

from torchvision.datasets import ImageFolder

import vitcompress as vc

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="name of the timm architecture")
parser.add_argument("--weights", required=True, help="checkpoint: .pth or .safetensors")
parser.add_argument("--data", required=True, help="folder with train/ and val/")
parser.add_argument("--classes", type=int, required=True)
parser.add_argument("--img-size", type=int, default=224)
parser.add_argument("--keep-ratio", type=float, default=0.7, help="share of channels to keep")
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--protocol", default="robust", help="of the benchmark: robust or paper")
parser.add_argument("--out", default="compressed")
args = parser.parse_args()

dense = vc.create_model(args.model, weights=args.weights, num_classes=args.classes, img_size=args.img_size)
train, val = ImageFolder(f"{args.data}/train"), ImageFolder(f"{args.data}/val")
print("dense:", vc.evaluate(dense, val), vc.count_cost(dense))

plan = vc.plan(dense, "isomorphic", train, keep_ratio=args.keep_ratio, images=min(len(train), 3200))
small = vc.prune(dense, plan)
print("pruned:", vc.evaluate(small, val), vc.count_cost(small))

vc.finetune(small, train, val, teacher=dense, epochs=args.epochs, batch_size=args.batch_size, lr=5e-4)
small = vc.fold(small)
print("fine-tuned:", vc.evaluate(small, val))

vc.save_model(small, args.out)
file = vc.export(small, f"{args.out}/model.onnx", data=val, class_names=train.classes)
print("verified:", vc.verify(args.out).passed)
print(vc.bench([dense, small, file], batch=8, protocol=args.protocol))
