"""What the compiled kernels take at most. No torch."""

LARGEST_HEAD_DIM = 1024
MOST_EXPERTS = 1024
