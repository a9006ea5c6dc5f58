"""Random codes of quantised weights, and the words that checkpoints hold them in."""

import torch


def random_codes(n: int, k: int, bits: int, group: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(codes [n, k] uint8, scales [groups, n] float16, zeros [groups, n] uint8, from 1); group: -1 for one."""
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if group == -1 else -(-k // group)
    codes = torch.randint(0, 1 << bits, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(groups, n, generator=generator) + 0.5).half() / (1 << bits)
    zeros = torch.randint(1, 1 << bits, (groups, n), generator=generator, dtype=torch.uint8)
    return codes, scales, zeros


def gptq_words(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Codes side by side along `dim`, lowest bits first, in int32 words."""
    per_word = 32 // bits
    shape = list(codes.shape)
    shape[dim] //= per_word
    words = torch.zeros(shape, dtype=torch.int64)
    for i in range(codes.shape[dim]):
        words.select(dim, i // per_word).bitwise_or_(codes.select(dim, i).long() << (bits * (i % per_word)))
    return words.to(torch.int32)


def random_scaled(
    shape: tuple[int, ...], dtype: torch.dtype, blocks: bool, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [..., n, k] of dtype; scales float32: [..., n], or [..., ceil(n / 128), ceil(k / 128)])."""
    generator = torch.Generator().manual_seed(seed)
    *lead, n, k = shape
    values = (torch.randn(shape, generator=generator) * 30).clamp(-120, 120).to(dtype)
    scales = torch.rand(*lead, *((-(-n // 128), -(-k // 128)) if blocks else (n,)), generator=generator) + 0.5
    return values, scales / 100
