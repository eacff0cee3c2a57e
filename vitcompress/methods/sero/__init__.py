"""SERo: structured sparsity explored while training, then sliced and optimized anew."""
