"""Learned maps over the tokens of a chunk, in the place of attention."""
