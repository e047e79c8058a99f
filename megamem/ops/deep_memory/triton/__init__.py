"""Deep memories by kernels in Triton: a group of inner chunks written and read, and what kept networks answer.

Nothing is imported from here unless it is chosen: all files need the package triton.
"""
