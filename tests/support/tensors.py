"""Tensors of weights, for tests that count them."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch


def tensors_of(of: object) -> Iterator[torch.Tensor]:
    """Every tensor of weights, of their layers too."""
    if isinstance(of, torch.Tensor):
        yield of
    elif isinstance(of, list | tuple):
        for each in of:
            yield from tensors_of(each)
    elif is_dataclass(of):
        for field in fields(of):
            yield from tensors_of(getattr(of, field.name))
