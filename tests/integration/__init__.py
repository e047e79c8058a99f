"""The whole system on tiny data: training, interruption, stuck ranks, bad input."""
