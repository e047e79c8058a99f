"""Writing the inner chunks of deep memories by kernels in Triton, one kernel for a group of inner chunks.

Nothing is imported from here unless it is chosen: all files need the package triton.
"""
