"""Limits of the compiled kernels. No torch."""

LARGEST_HEAD_DIM = 1024
MOST_EXPERTS = 1024
