"""Oracles of architectures: whole models as slow loops over the oracles of their layers' mixers."""
