"""Memories that are small networks, trained on the text while they read it."""
