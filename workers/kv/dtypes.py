"""Dtypes of a KV cache, and the bytes that a vector of head_dim numbers takes in each. No torch.

    bfloat16, float32   numbers alone
    int8, fp8 (e4m3)    scaled: [scale: bfloat16, little-endian][head_dim numbers of one byte each]; a number is scale x
                        stored, and scale the largest magnitude of the vector / the largest number that is stored,
                        rounded up to a bfloat16, before the numbers are divided by it: so they are as near as by a
                        scale of float32, but for steps that are at most 1/128 wider

A vector is a token's key or value in one layer and head. It has a scale of its own, beside its numbers: so its bytes
depend on no other token, batch or chunk, and whatever moves vectors (blocks, heads, layers) moves their scales.
"""

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}  # of a number, of the dtypes that models compute in
LARGEST_STORED = {"int8": 127.0, "fp8": 448.0}  # of the scaled dtypes
SCALE_BYTES = 2
SMALLEST = 1e-33  # a vector whose numbers are all below it is stored as zeros, with a scale of zero


def is_scaled(dtype: str) -> bool:
    return dtype in LARGEST_STORED


def is_known(dtype: str) -> bool:
    """Return whether a cache can have this dtype."""
    return dtype in DTYPE_BYTES or dtype in LARGEST_STORED


def vector_bytes(dtype: str, head_dim: int) -> int:
    return DTYPE_BYTES[dtype] * head_dim if dtype in DTYPE_BYTES else SCALE_BYTES + head_dim
