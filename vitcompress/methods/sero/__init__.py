"""SERo: structured sparsity explored while training, then sliced and optimised anew."""
