"""UP-ViT: cut a model down to a standard one, keeping the channels and blocks whose loss changes the outputs most."""
