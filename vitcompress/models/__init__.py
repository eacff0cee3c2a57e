"""timm models by name, pruned models from disk, and what they cost."""
