"""Compiled choice of each row's experts: the twin of ../moe/moe_routing.py."""

import ctypes

import torch
from torch import Tensor

from ..moe.moe_routing import Routing
from .library import Team
from .limits import MOST_EXPERTS

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class PackedRouting(ctypes.Structure):
    """routing.h's struct Routing. Valid while the bias lives."""

    _fields_ = (
        *((name, _L) for name in ("num_experts", "top_k", "num_groups", "top_groups")),
        ("bias", _P),
        *((name, _I) for name in ("is_sigmoid", "renormalises", "groups_by_two")),
        ("scale", _F),
    )

    @classmethod
    def of(cls, by: Routing, num_experts: int, bias: Tensor | None) -> "PackedRouting":
        """bias: [num_experts] float32 contiguous."""
        by.check(num_experts)
        assert num_experts <= MOST_EXPERTS
        assert bias is None or (bias.shape == (num_experts,) and bias.dtype == torch.float32 and bias.is_contiguous())
        address = None if bias is None else bias.data_ptr()
        groups = (by.num_groups, by.top_groups)
        return cls(num_experts, by.top_k, *groups, address, by.sigmoid, by.renormalise, by.group_by_two, by.scale)


def route(team: Team, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute what moe_routing does. logits: [T, E] float32, last axis contiguous."""
    num_tokens, num_experts = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    by = PackedRouting.of(routing, num_experts, bias)
    weights = torch.empty(num_tokens, routing.top_k)
    experts = torch.empty(num_tokens, routing.top_k, dtype=torch.int32)
    kernel = team.library.kernel("route", _P, _P, _L, _L, _P, _P)
    address, logits_at = ctypes.addressof(by), logits.data_ptr()
    kernel(team.address, address, logits_at, logits.stride(0), num_tokens, weights.data_ptr(), experts.data_ptr())
    return weights, experts
