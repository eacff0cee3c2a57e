"""One training loop for everything that learns, its data and its metrics."""
