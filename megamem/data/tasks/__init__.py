"""Synthetic tasks as data sources: examples made when they are read."""
