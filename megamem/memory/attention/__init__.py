"""Softmax attention within a block, over the whole past, over a sliding window, and to a queue of old keys."""
