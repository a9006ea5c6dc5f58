"""Random codes and numbers of quantised weights."""

import torch


def random_codes(n: int, k: int, bits: int, group: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(codes [n, k] uint8, scales [groups, n] float16, zeros [groups, n] uint8, from 1); group: -1 for one."""
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if group == -1 else -(-k // group)
    codes = torch.randint(0, 1 << bits, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(groups, n, generator=generator) + 0.5).half() / (1 << bits)
    zeros = torch.randint(1, 1 << bits, (groups, n), generator=generator, dtype=torch.uint8)
    return codes, scales, zeros


def random_scaled(
    shape: tuple[int, ...], dtype: torch.dtype, blocks: bool, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [..., n, k] of dtype; scales float32: [..., n], or [..., ceil(n / 128), ceil(k / 128)])."""
    generator = torch.Generator().manual_seed(seed)
    *lead, n, k = shape
    values = (torch.randn(shape, generator=generator) * 30).clamp(-120, 120).to(dtype)
    scales = torch.rand(*lead, *((-(-n // 128), -(-k // 128)) if blocks else (n,)), generator=generator) + 0.5
    return values, scales / 100
