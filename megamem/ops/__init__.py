"""Tensor operations without parameters: attention kernels, recurrences, deep memories and rotary positions."""
