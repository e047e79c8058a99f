"""Callbacks: what happens around training steps besides training."""
