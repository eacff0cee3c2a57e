"""Read and write plain data: files, tensors, check results, text, hardware facts. Independent of models."""
