"""Recurrent memories: matrices and small networks per head that every token writes and reads."""
