"""Sources of tokens, the order they are read in, and the batches made of them."""
