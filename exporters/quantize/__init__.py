"""Linear layers in eight bits: ranges of their inputs, files that use them, and their emulation in torch."""
