"""Softmax attention: within a block, over all of the past, over a sliding window, and to a queue of old keys."""
