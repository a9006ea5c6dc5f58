"""What benchmarks/kernels.py asks of the files beside this one: `cases()`, which makes Cases one after another."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Case:
    kernel: str
    shape: str
    run: Callable[[], object]  # what may stand in a graph: no host reads the device
    num_bytes: float  # that must at least be read and written
    num_flops: float
    against: dict[str, Callable[[], object]] = field(default_factory=dict)  # the same by torch, by its name


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)
