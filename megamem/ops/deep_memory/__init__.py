"""Memories that are small networks, trained while they read."""
