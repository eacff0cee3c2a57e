"""The smallest study: two rows of a tiny model on the digits, as TOML."""

TINY = """
summary = "two rows"
epochs = 2

[speed]
protocol = "paper"
batch = 2
warmup = 1
runs = 3

[base]
data = { source = "digits" }
dense = { epochs = 1, batch_size = 64, lr = 2e-3 }
finetune = { batch_size = 64, lr = 1e-3, distillation = "soft", teacher = "dense" }
bench = { runtimes = [] }
export = { formats = [] }
run = { device = "cpu", threads = 1 }

[base.model]
name = "vit_tiny_patch16_224"
args = { img_size = 8, patch_size = 4, in_chans = 1, embed_dim = 16, depth = 2, num_heads = 2 }
weights = "train"

[options.random]
attention = 1

[[row]]
name = "control"
curve = "Control"
title = "dense, trained on"
step = [{ method = "fold" }]

[[row]]
name = "random_2"
curve = "random"
against = ["Control"]
title = "two layers at random"
step = [{ method = "random", pruned_layers = 2 }]
"""
