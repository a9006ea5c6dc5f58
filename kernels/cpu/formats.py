"""Storage formats of weights for the compiled kernels' products. No torch."""

from enum import IntEnum


class Format(IntEnum):
    """Storage format of weights."""

    PLAIN = 0  # as they are
    INT8 = 1  # whole numbers from -127 to 127, a scale for each output
    INT4 = 2  # from -8 to 7, a scale for each group of inputs of an output


def group_of(format: Format, k: int) -> int:
    """Inputs of an output that share a scale."""
    if format != Format.INT4:
        return k
    return next((group for group in (128, 64) if k % group == 0), 32)


def stored_bytes(n: int, k: int, item_bytes: int, format: Format) -> int:
    """Bytes of a weight [n, k] and its float32 scales. item_bytes: of a number that is stored as it is."""
    match format:
        case Format.PLAIN:
            return n * k * item_bytes
        case Format.INT8:
            return n * k + 4 * n
        case Format.INT4:
            return n * -(-k // 2) + 4 * n * -(-k // group_of(format, k))
