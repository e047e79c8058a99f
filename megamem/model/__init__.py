"""The transformer around the mixers."""
