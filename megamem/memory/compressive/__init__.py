"""Memories that compress past blocks into a state of fixed size."""
