"""Memories that keep the past as a function of time."""
