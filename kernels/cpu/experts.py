"""Compiled kernels of a mixture's experts. Their twin is workers/models/layers/moe.py's."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..moe.moe_routing import Routing
from .library import DTYPES, Team
from .linear import Epilogue, Linear, PackedLinear

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_MOST_ROWS_AT_ONCE = 240  # linear.h
_LINE_BYTES = 64  # of a cache


@dataclass(frozen=True, slots=True)
class Gate:
    """The function of gate and up: activation(gate) * up, or gpt-oss's clamped form, with its `alpha` and `limit`."""

    epilogue: Epilogue = Epilogue.SILU_MUL
    alpha: float = 0.0
    limit: float = 0.0


class Experts(ctypes.Structure):
    """experts.h's struct Experts."""

    _fields_ = (
        *((name, _P) for name in ("gate_up", "down")),
        *((name, _L) for name in ("first", "count", "top_k", "hidden_size", "inner_size")),
        ("gate", _I),
        *((name, _F) for name in ("alpha", "limit")),
    )


class ExpertRows(ctypes.Structure):
    """experts.h's struct ExpertRows."""

    _fields_ = (
        ("num_rows", _L),
        *((name, _P) for name in ("weights", "ids", "starts", "rows", "places", "gathered", "inner", "outputs")),
        *((name, _L) for name in ("gathered_stride", "inner_stride")),
    )


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    count: int
    top_k: int
    hidden_size: int
    inner_size: int
    dtype: torch.dtype


class PackedExperts:
    """Experts [first, first + E) of a layer, each packed by `pack`: gate_up, for its gate, and down. `of` points into
    them."""

    def __init__(
        self,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        top_k: int,
        gate: Gate = Gate(),
        first: int = 0,
    ) -> None:
        inner, hidden = gate_up[0].num_outputs, gate_up[0].of.k
        assert len(gate_up) == len(down) and top_k > 0 and first >= 0
        assert gate.epilogue in (Epilogue.SILU_MUL, Epilogue.GELU_MUL, Epilogue.CLAMPED_MUL)
        for e_gate_up, e_down in zip(gate_up, down, strict=True):
            assert (e_gate_up.num_outputs, e_gate_up.of.k, e_gate_up.of.is_gated) == (inner, hidden, True)
            assert (e_down.num_outputs, e_down.of.k, e_down.of.is_gated) == (hidden, inner, False)
            assert e_gate_up.dtype == e_down.dtype == gate_up[0].dtype
        self.sizes = ExpertSizes(len(gate_up), top_k, hidden, inner, gate_up[0].dtype)
        self._kept = gate_up, down
        self._gate_up, self._down = ((Linear * len(of))(*(p.of for p in of)) for of in (gate_up, down))
        addresses = ctypes.addressof(self._gate_up), ctypes.addressof(self._down)
        sizes = first, len(gate_up), top_k, hidden, inner
        self.of = Experts(*addresses, *sizes, gate.epilogue, gate.alpha, gate.limit)


@dataclass(frozen=True, slots=True)
class PackedMixture:
    """Packed weights of a mixture in place of a layer's MLP, H wide; `choice_bias`: [E] float32, or None."""

    router: PackedLinear  # [E, H], E experts of all ranks
    routing: Routing
    choice_bias: Tensor | None
    experts: PackedExperts

    def __post_init__(self) -> None:
        of = self.experts.of
        assert (self.router.of.k, self.router.dtype) == (of.hidden_size, self.experts.sizes.dtype)
        assert of.first + of.count <= self.num_experts and of.top_k == self.routing.top_k

    @property
    def num_experts(self) -> int:
        return self.router.of.n


class ExpertMemory:
    """Memory in which experts compute up to a number of rows; all layers use it in turn."""

    def __init__(self, team: Team, of: ExpertSizes, num_rows: int) -> None:
        dtype = of.dtype
        num_pairs = num_rows * of.top_k
        self.weights = torch.empty(num_rows, of.top_k)
        self.ids = torch.empty(num_rows, of.top_k, dtype=torch.int32)
        hidden_stride, inner_stride = row_stride(of.hidden_size, dtype), row_stride(of.inner_size, dtype)
        buffers = {
            "weights": self.weights,
            "ids": self.ids,
            "starts": torch.empty(of.count + 2, dtype=torch.int32),
            "rows": torch.empty(num_pairs, dtype=torch.int32),
            "places": torch.empty(num_pairs, dtype=torch.int32),
            "gathered": torch.empty(team.num_threads, _MOST_ROWS_AT_ONCE, hidden_stride, dtype=dtype),
            "inner": torch.empty(num_pairs, inner_stride, dtype=dtype),
            "outputs": torch.empty(num_pairs, of.hidden_size, dtype=dtype),
        }
        self._kept = buffers
        addresses = {name: buffer.data_ptr() for name, buffer in buffers.items()}
        self.struct = ExpertRows(num_rows, **addresses, gathered_stride=hidden_stride, inner_stride=inner_stride)
        self.address = ctypes.addressof(self.struct)

    def fill(self, weights: Tensor, ids: Tensor) -> None:
        """Copy the weights and ids, laid out as in `experts`."""
        num_rows = len(ids)
        assert num_rows <= len(self.ids)
        self.struct.num_rows = num_rows
        self.weights[:num_rows] = weights
        self.ids[:num_rows] = ids


def row_stride(size: int, dtype: torch.dtype) -> int:
    """Elements between rows that are multiplied by weights. They lie so that a tile's do not meet in the same few sets
    of a cache, as they would at a stride of, say, 4 KB."""
    return size + (_LINE_BYTES // dtype.itemsize if size * dtype.itemsize % 1024 == 0 else 0)


def experts(
    team: Team,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    packed: PackedExperts,
    add_to: Tensor | None = None,
    memory: ExpertMemory | None = None,
) -> Tensor:
    """sum over j of weights[t, j] * down_e(gate(gate_e(x), up_e(x))), where e = ids[t, j]; x: [T, H], rows contiguous.

    weights: [T, top_k] float32; ids: [T, top_k] int32: -1, and those that are not of `packed`, add nothing. Returns
    [T, H] of x's dtype; or `add_to`, of the same dtype or float32, to which it was added.
    """
    (num_rows, hidden), top_k = x.shape, packed.of.top_k
    assert hidden == packed.of.hidden_size and x.dtype == packed.sizes.dtype and x.stride(1) == 1
    assert weights.shape == ids.shape == (num_rows, top_k)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    out = torch.empty(num_rows, hidden, dtype=x.dtype) if add_to is None else add_to
    assert out.shape == (num_rows, hidden) and out.dtype in (x.dtype, torch.float32) and out.stride(1) == 1
    memory = ExpertMemory(team, packed.sizes, num_rows) if memory is None else memory
    memory.fill(weights, ids)
    kernel = team.library.kernel("experts", _P, _P, _I, _P, _L, _I, _P, _L, _I)
    where = DTYPES[x.dtype], x.data_ptr(), x.stride(0), DTYPES[out.dtype], out.data_ptr(), out.stride(0)
    kernel(team.address, ctypes.addressof(packed.of), memory.address, *where, add_to is not None)
    return out
