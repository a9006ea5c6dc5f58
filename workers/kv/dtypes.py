"""Dtypes of a KV cache, and the bytes that a vector of head_dim numbers takes in each. No torch.

    bfloat16, float32   numbers alone
    int8, fp8 (e4m3)    scaled: [scale: bfloat16, little-endian][head_dim numbers of one byte each]; a number is scale x
                        stored, and scale the largest magnitude of the vector / the largest number that is stored,
                        rounded up to a bfloat16, before the numbers are divided by it: so they are as near as by a
                        scale of float32, but for steps that are at most 1/128 wider
    int4                scaled, of the vector's Hadamard transform (below): [scale][head_dim / 2 bytes]; byte i holds
                        the numbers i, in its low bits, and i + head_dim / 2: code c is the odd number 2 c - 15

A vector is a token's key or value in one layer and head. It has a scale of its own, beside its numbers: so its bytes
depend on no other token, batch or chunk, and whatever moves vectors (blocks, heads, layers) moves their scales.

Few numbers of a key are much larger than the others, always in the same places of a head, and of 4 bits a step that is
wide enough for them leaves little of the rest. So int4 keeps the Hadamard transform H of a vector, sums and differences
in which each number is spread over many (QuaRot, arXiv 2404.00456). It is taken of `transform_size` neighbours at a
time. H H is that size times 1, so that the product of a transformed query and a transformed key is theirs, times the
size.

    kivi                of GROUP tokens, a block: keys [head_dim / 2 bytes of each token], and of each of the head_dim
                        channels [scale][least number]; values the same, with a scale and a least number of each GROUP
                        numbers of a token. A number is code x scale + least; both bfloat16 (kernels/kv/kivi.py)

Large numbers of keys stand in the same channels of all tokens, so that kivi, which has a step for each channel, does
not spread them (KIVI, arXiv 2402.02750). Its numbers can be rounded only once a block is full. Until then a sequence's
block is in the KV tail, at full width, in which each token reads its own block, and in kivi those before.
"""

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}  # of a number, of the dtypes that models compute in
LARGEST_STORED = {"int8": 127.0, "fp8": 448.0, "int4": 15.0}  # of the scaled dtypes
KIVI = "kivi"
KV_DTYPES = (*LARGEST_STORED, KIVI)  # that a cache can have instead of the model's
GROUP = 32  # numbers that share a step in kivi; and tokens of its blocks
SCALE_BYTES = 2
SMALLEST = 1e-33  # a vector whose numbers are all below it is stored as zeros, with a scale of zero


def is_scaled(dtype: str) -> bool:
    return dtype in LARGEST_STORED


def is_known(dtype: str) -> bool:
    """Return whether a cache can have this dtype."""
    return dtype in DTYPE_BYTES or dtype in KV_DTYPES


def is_rounded_by_block(dtype: str) -> bool:
    """Return whether numbers are stored only once their block is full, all of a block together."""
    return dtype == KIVI


def numbers_in(dtype: str) -> int:
    """Number of a vector's numbers that an element of a cache's tensors holds."""
    return 2 if dtype in ("int4", KIVI) else 1


def dim_multiple(dtype: str) -> int:
    """Number of which a vector's head_dim is a multiple."""
    return GROUP if dtype == KIVI else numbers_in(dtype)


def stored_size(dtype: str, head_dim: int) -> int:
    """Number of elements that a vector's numbers take in a cache's tensors."""
    return head_dim // numbers_in(dtype)


def vector_bytes(dtype: str, head_dim: int) -> int:
    """Number of bytes that a vector takes, with its scale."""
    if dtype == KIVI:
        return stored_size(dtype, head_dim) + 2 * SCALE_BYTES * head_dim // GROUP
    return SCALE_BYTES + stored_size(dtype, head_dim) if is_scaled(dtype) else DTYPE_BYTES[dtype] * head_dim


def transform_size(head_dim: int) -> int:
    """Number of neighbours that a Hadamard transform is taken of at a time: the largest power of two that divides
    head_dim / 2, so that each half of a vector, as rotary embeddings have them, is transformed alone."""
    half = head_dim // 2
    return half & -half
