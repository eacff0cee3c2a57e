"""HetDPT: remove attentions and activations together, so that what is left of the FFN can be folded."""
