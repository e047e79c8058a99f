"""Tensor operations without parameters: attention kernels and rotary positions."""
