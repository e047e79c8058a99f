"""Mixers made of other mixers."""
