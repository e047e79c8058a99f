"""Recurrent memories: matrices and small networks that every token writes and reads."""
