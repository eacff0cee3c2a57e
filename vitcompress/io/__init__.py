"""Plain data in and out: files, tensors, check results, text, hardware facts. Knows no model."""
