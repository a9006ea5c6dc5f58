"""x W^T by the compiled kernels: weights packed once, at load, and multiplied by any number of rows."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .formats import AT_LOAD, MOST_IN_GROUP, Format, NumberLayout, group_of
from .library import DTYPES, Team

_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
PANEL = 32  # outputs


class Epilogue(IntEnum):
    """Operation that follows y = x W^T + bias in the same pass; rounded once."""

    STORE = 0
    ADD = 1  # out += y
    SILU_MUL = 2  # silu(gate) * up, where y = [gate, up]
    GELU_MUL = 3  # the same with GELU's tanh form
    CLAMPED_MUL = 4  # of gpt-oss; only in experts.py


class Linear(ctypes.Structure):
    """linear.h's struct Linear."""

    _fields_ = (
        ("weight", _P),
        ("scales", _P),
        ("offsets", _P),
        ("table", _P),
        ("sums", _P),
        ("bias", _P),
        ("n", _L),
        ("k", _L),
        ("format", _I),
        ("is_gated", _I),
        ("group", _L),
        ("order", _P),
        ("at_once", _L),
        ("are_powers", _L),
        ("by_tiles", _L),
    )


class WeightRows(ctypes.Structure):
    """linear.h's struct WeightRows."""

    _fields_ = (("rows", _P), ("num_rows", _L), ("stride", _L))


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """W [n, k] and its bias, packed; `of` points into the tensors."""

    of: Linear
    dtype: torch.dtype
    weight: Tensor  # uint8
    scales: Tensor | None  # float32 [panels, groups, 32]
    bias: Tensor | None  # float32, in packed order
    offsets: Tensor | None = None  # as scales
    table: Tensor | None = None  # float32 [24], as linear.h has it
    sums: Tensor | None = None  # int32 [panels, 32], of W8A8
    order: Tensor | None = None  # int32 [k]: the input of a row that has each place

    @property
    def num_outputs(self) -> int:
        return self.of.n // 2 if self.of.is_gated else self.of.n


def packed_bytes(n: int, k: int, dtype: torch.dtype, format: Format = Format.PLAIN) -> int:
    """Memory that `pack` takes for the weights, without scales."""
    inputs = 4 // dtype.itemsize if format == Format.PLAIN else format.inputs
    return -(-n // PANEL) * PANEL * -(-k // inputs) * 4


Take = Callable[[int], Tensor]  # that many bytes, uint8, aligned to 64


def in_the_heap(num_bytes: int) -> Tensor:
    """A Take."""
    return torch.empty(num_bytes, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class WeightNumbers:
    """Numbers of some rows of a weight, of inputs k, and what they mean: number x scale + offset."""

    numbers: Tensor  # int8 [n, k]; of 4 bits the lowest four count
    scales: Tensor  # float32 [n, groups]
    offsets: Tensor | None = None  # float32 [n, groups]
    table: Tensor | None = None  # float32 [16]: what numbers of 4 bits stand for, in a TABLE4
    order: Tensor | None = None  # int64 [k]: the input that has each place; None: each has its own


def pack(
    team: Team,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    format: Format = Format.PLAIN,
    scales: Tensor | None = None,
    take: Take = in_the_heap,
) -> PackedLinear:
    """weights: [n_i, k] of one dtype, float32 or bfloat16, rows contiguous: W is them below one another. bias: [n].

    gated: W is a gate and its up, of as many rows each. scales: float32 [n, groups], to quantise with, where W is a
    part of longer rows; None: W's own.
    """
    assert format in AT_LOAD
    dtype, k = weights[0].dtype, weights[0].shape[1]
    assert all(w.dtype == dtype and w.shape[1] == k and w.stride(1) == 1 for w in weights) and k > 0
    n = sum(w.shape[0] for w in weights)
    assert bias is None or bias.shape == (n,)
    assert not gated or n % 2 == 0
    group, num_panels = group_of(format, k), -(-n // PANEL)
    num_groups = -(-k // group)
    if scales is not None:
        assert scales.shape == (n, num_groups) and scales.dtype == torch.float32 and scales.is_contiguous()
    packed = take(packed_bytes(n, k, dtype, format))
    stored_scales = None if format == Format.PLAIN else torch.empty(num_panels, num_groups, PANEL)
    wide = _packed_bias(bias, num_panels, gated) if bias is not None else None
    parts = (WeightRows * len(weights))(*((w.data_ptr(), w.shape[0], w.stride(0)) for w in weights))
    kernel = team.library.kernel("pack_linear", _I, _P, _L, _L, _L, _I, _I, _L, *[_P] * 4)
    to, are_uneven = (packed.data_ptr(), address_of(stored_scales)), ctypes.c_int32()
    numbers = Format.INT8 if format == Format.W8A8 else format
    what = DTYPES[dtype], parts, len(weights), n, k, gated, numbers, group
    kernel(team.address, *what, address_of(scales), *to, ctypes.byref(are_uneven))
    sums = _sums(packed, num_panels) if format == Format.W8A8 else None
    summed = _in_ratios(team, dtype, stored_scales, group, are_uneven)
    own = address_of(sums), address_of(wide)
    of = Linear(*to, None, None, *own, n, k, format, gated, group, None, *summed, team.library.by_tiles)
    return PackedLinear(of, dtype, packed, stored_scales, wide, sums=sums)


def pack_numbers(
    team: Team,
    parts: Sequence[WeightNumbers],
    layout: NumberLayout,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    take: Take = in_the_heap,
) -> PackedLinear:
    """W is the parts below one another, all with the groups of `layout`, all or none with offsets, and with one table
    and one order; it is multiplied by rows of `dtype`. bias, gated: as `pack` has them. In bfloat16 the table is
    rounded to it."""
    k, n, group = parts[0].numbers.shape[1], sum(len(part.numbers) for part in parts), layout.group
    num_panels, num_groups = -(-n // PANEL), -(-k // group)
    assert all(part.numbers.shape[1] == k and part.numbers.stride(1) == 1 for part in parts)
    assert all(part.scales.shape == (len(part.numbers), num_groups) for part in parts)
    assert bias is None or bias.shape == (n,)
    assert group >= k or group % 8 == 0
    scales = torch.cat([part.scales for part in parts]).contiguous()
    given = [part.offsets for part in parts if part.offsets is not None]
    assert len(given) == (len(parts) if layout.has_offsets else 0)
    offsets, stored_offsets = None, None
    if given:
        offsets, stored_offsets = torch.cat(given).contiguous(), torch.empty(num_panels, num_groups, PANEL)
    table = None if parts[0].table is None else _packed_table(parts[0].table.to(dtype))
    assert (table is None) == (layout.format != Format.TABLE4)
    packed = take(packed_bytes(n, k, dtype, layout.format))
    stored_scales = torch.empty(num_panels, num_groups, PANEL)
    wide = _packed_bias(bias, num_panels, gated) if bias is not None else None
    rows = ((part.numbers.data_ptr(), len(part.numbers), part.numbers.stride(0)) for part in parts)
    kernel = team.library.kernel("pack_numbers", _P, _L, _L, _L, _I, _I, _L, *[_P] * 7)
    what = (WeightRows * len(parts))(*rows), len(parts), n, k, gated, layout.format.inputs, group
    to = packed.data_ptr(), stored_scales.data_ptr(), address_of(stored_offsets)
    are_uneven = ctypes.c_int32()
    meaning = scales.data_ptr(), address_of(offsets), address_of(table)
    kernel(team.address, *what, *meaning, *to, ctypes.byref(are_uneven))
    sums = _sums(packed, num_panels) if layout.format == Format.W8A8 else None
    order = _order_of(parts)
    assert (order is not None) == layout.has_order and (order is None or sums is None)
    own = address_of(table), address_of(sums), address_of(wide)
    at_once, are_powers = _in_ratios(team, dtype, stored_scales, group, are_uneven)
    summed = at_once, are_powers and not layout.has_offsets, team.library.by_tiles
    of = Linear(*to, *own, n, k, layout.format, gated, group, address_of(order), *summed)
    return PackedLinear(of, dtype, packed, stored_scales, wide, stored_offsets, table, sums, order)


def _in_ratios(
    team: Team, dtype: torch.dtype, scales: Tensor | None, group: int, are_uneven: ctypes.c_int32
) -> tuple[int, bool]:
    """Overwrite scales [panels, groups, 32] with what products of rows of `dtype` read. Returns Linear's at_once and
    are_powers."""
    num_groups = 1 if are_uneven.value else max(MOST_IN_GROUP // group, 1)
    if scales is None:
        return num_groups * group, False
    are_powers = bool((torch.frexp(scales).mantissa == 0.5).all())
    kernel = team.library.kernel("pack_ratios", _I, _L, _L, _L, _P)
    kernel(team.address, DTYPES[dtype], *scales.shape[:2], num_groups, scales.data_ptr())
    return num_groups * group, are_powers


def _order_of(parts: Sequence[WeightNumbers]) -> Tensor | None:
    """Order that all parts' inputs have, int32."""
    first = parts[0].order
    if first is None:
        assert all(part.order is None for part in parts)
        return None
    assert all(part.order is not None and torch.equal(part.order, first) for part in parts)
    return first.int()


def _packed_table(table: Tensor) -> Tensor:
    """table: [16]. Returns it as linear.h has it, float32 [24]."""
    assert table.shape == (16,)
    bits = table.bfloat16().view(torch.uint8).view(16, 2).T.contiguous()
    return torch.cat([table.float().view(torch.uint8), bits.flatten()]).view(torch.float32)


def _sums(packed: Tensor, num_panels: int) -> Tensor:
    """Sum of the int8 numbers of each output."""
    return packed.view(torch.int8).view(num_panels, -1, PANEL, 4).sum((1, 3), dtype=torch.int32)


def _packed_bias(bias: Tensor, num_panels: int, gated: bool) -> Tensor:
    """[n] -> float32 [num_panels * PANEL], in the order of the outputs' lanes."""
    parts = 2 if gated else 1
    wide = torch.zeros(parts, num_panels * PANEL // parts)
    wide[:, : bias.shape[0] // parts] = bias.float().view(parts, -1)
    return wide.view(parts, num_panels, -1).transpose(0, 1).flatten()


def address_of(tensor: Tensor | None) -> int | None:
    """Address of a tensor's memory; None if there is no tensor."""
    return None if tensor is None else tensor.data_ptr()


def linear(
    team: Team, x: Tensor, packed: PackedLinear, epilogue: Epilogue = Epilogue.STORE, out: Tensor | None = None
) -> Tensor:
    """x: [R, k] of the weights' dtype, rows contiguous. Returns `out`: [R, n], or [R, n / 2] of a gate; of the same
    dtype, or float32. It is made where not given, but for Epilogue.ADD."""
    num_rows, k = x.shape
    gates = epilogue in (Epilogue.SILU_MUL, Epilogue.GELU_MUL)
    assert k == packed.of.k and x.dtype == packed.dtype and x.stride(1) == 1 and gates == bool(packed.of.is_gated)
    if out is None:
        assert epilogue != Epilogue.ADD
        out = torch.empty(num_rows, packed.num_outputs, dtype=x.dtype)
    assert out.shape == (num_rows, packed.num_outputs) and out.stride(1) == 1 and out.dtype in (x.dtype, torch.float32)
    kernel = team.library.kernel("linear", _P, _I, _P, _L, _L, _I, _P, _L, _I)
    kernel(
        team.address,
        ctypes.addressof(packed.of),
        DTYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        num_rows,
        DTYPES[out.dtype],
        out.data_ptr(),
        out.stride(0),
        epilogue,
    )
    return out
