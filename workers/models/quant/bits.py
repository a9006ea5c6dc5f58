"""Numbers of few bits that are packed in words, unpacked. Each function takes and gives tensors on CPU."""

import torch
from torch import Tensor

# Of a 4-bit float (E2M1), by its bits: sign, two of the exponent, one of the mantissa (OCP Microscaling Formats v1.0,
# section 5.3.3).
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of the word that holds each of eight neighbours
E8M0_BIAS = 127


def num_words(num: int, bits: int) -> int:
    """Number of 32-bit words that hold `num` numbers side by side."""
    return -(-num * bits // 32)


def unpack_words(words: Tensor, bits: int, num: int) -> Tensor:
    """words: int32 [n, w], each row a stream of bits, lowest first. Returns int32 [n, num] of whole numbers from 0."""
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        return ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :num]
    start = torch.arange(num) * bits
    word, shift = start // 32, start % 32
    low = words.long() & 0xFFFFFFFF
    next_word = torch.where(word + 1 < words.shape[1], word + 1, 0)
    pair = low[:, word] | (low[:, next_word] << 32)
    return ((pair >> shift) & ((1 << bits) - 1)).int()


def unpack_columns(words: Tensor, bits: int, num: int) -> Tensor:
    """words: int32 [w, n], each column a stream of bits, lowest first. Returns float32 [num, n]."""
    if 32 % bits:
        return unpack_words(words.T.contiguous(), bits, num).T.float()
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[:, None] >> shifts[:, None]) & ((1 << bits) - 1)).flatten(0, 1)[:num].float()


def unpack_awq(words: Tensor) -> Tensor:
    """words: int32 [n, w]. Returns int32 [n, 8 w], in AutoAWQ's order of nibbles."""
    shifts = torch.tensor(AWQ_ORDER, dtype=torch.int32) * 4
    return ((words[:, :, None] >> shifts) & 15).flatten(1)


def nibbles(packed: Tensor) -> Tensor:
    """packed: uint8 [.., w], low nibble first. Returns int8 [.., 2 w], from 0 to 15."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).view(torch.int8)


def unpack_fp4(packed: Tensor) -> Tensor:
    """packed: uint8 [.., w], low nibble first. Returns float32 [.., 2 w]."""
    return FP4[nibbles(packed).int()]


def scales_of_exponents(exponents: Tensor) -> Tensor:
    """exponents: uint8, E8M0. Returns float32 powers of two; NaN for 255, as the format says."""
    powers = exponents.float() - E8M0_BIAS
    return torch.where(exponents == 255, torch.nan, torch.exp2(powers))
