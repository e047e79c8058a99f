"""Memories of a fixed size into which finished blocks are compressed."""
