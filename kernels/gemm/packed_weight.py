"""Weights of 4 or 8 bits in the layout of this folder's kernels.

A checkpoint's layout is undone once, when it is loaded. Ours: a weight is [N, K], each row's codes side by side, for
the shared axis of a product is contiguous in both of its factors. Of 4 bits, a byte holds the codes of k (low) and
k + 16 (high) in each run of 32: each half of a tile's bytes then meets columns of x that lie side by side, and no code
changes the thread that loaded it. Inputs that GPTQ's act-order scattered over groups are brought together; `order` says
which column of x each then meets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

_RUN = 32  # codes of one interleaved run
_LONG_GROUP = 64  # shortest group whose sums are scaled: of shorter ones each weight is
_COMPACT = (torch.bfloat16, torch.float16)  # dtypes of scales, where they hold them exactly


class Coding(IntEnum):
    """Numbers that codes stand for."""

    WHOLE = 0  # 4 bits: the code less 8; 8 bits: itself, an int8
    E2M1 = 1  # floats of 4 bits: a sign, and 0, 0.5, 1, 1.5, 2, 3, 4 or 6
    TABLE = 2  # one of 16 floats for each code of 4 bits
    E4M3 = 3  # floats of 8 bits, none of them NaN


E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*E2M1_MAGNITUDES, *(-of for of in E2M1_MAGNITUDES))
_BITS = {Coding.WHOLE: (4, 8), Coding.E2M1: (4,), Coding.TABLE: (4,), Coding.E4M3: (8,)}


@dataclass(frozen=True)
class PackedWeight:
    """Weight [..., N, K]: (number - zero) * scale + offset of its group. Leading axes: experts, or none."""

    codes: Tensor  # [..., N, ceil(K / 32) * 4 * bits] contiguous: uint8, but int8 where 8 bits are whole numbers
    scales: Tensor  # [..., groups, N] contiguous, floating
    zeros: Tensor | None  # [..., groups, N] contiguous int16, only of whole numbers; None: all 0
    order: Tensor | None  # [..., K] int32 contiguous: row k of the transposed weight meets column order[k] of x
    bits: int  # 4 or 8
    group: int  # along K, the last may be shorter; 0: one group
    k: int
    offsets: Tensor | None = None  # [..., groups, N] contiguous, floating; None: all 0
    coding: Coding = Coding.WHOLE
    table: Tensor | None = None  # [16] float32, of TABLE

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.k))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        tensors = (self.codes, self.scales, self.zeros, self.order, self.offsets, self.table)
        return sum(of.nbytes for of in tensors if of is not None)

    @property
    def is_scaled_first(self) -> bool:
        """Return whether kernels scale each weight, and round it to x's dtype, before it is multiplied; else they scale
        the sums of groups."""
        has_floats = self.coding in (Coding.E2M1, Coding.TABLE)
        return has_floats or self.offsets is not None or self.group % _LONG_GROUP != 0

    def __getitem__(self, expert: int) -> PackedWeight:
        """Return the weight of one expert."""
        zeros, order, offsets = (None if of is None else of[expert] for of in (self.zeros, self.order, self.offsets))
        codes, scales = self.codes[expert], self.scales[expert]
        return replace(self, codes=codes, scales=scales, zeros=zeros, order=order, offsets=offsets)

    def check(self) -> None:
        """Raises AssertionError where a tensor is not what the kernels take it for."""
        lead, n = self.codes.shape[:-2], self.codes.shape[-2]
        groups = -(-self.k // self.group) if self.group else 1
        is_int8 = self.bits == 8 and self.coding == Coding.WHOLE
        assert self.bits in _BITS[self.coding] and self.group >= 0 and self.k > 0
        assert self.codes.dtype == (torch.int8 if is_int8 else torch.uint8)
        assert self.codes.shape[-1] == -(-self.k // _RUN) * _RUN * self.bits // 8 and self.codes.is_contiguous()
        assert self.scales.shape == (*lead, groups, n) and self.scales.is_contiguous()
        for spread in (self.zeros, self.offsets):
            assert spread is None or (spread.shape == self.scales.shape and spread.is_contiguous())
        assert self.zeros is None or (self.zeros.dtype == torch.int16 and self.coding == Coding.WHOLE)
        if self.order is not None:
            assert self.order.shape == (*lead, self.k) and self.order.dtype == torch.int32
            assert self.order.is_contiguous()
        assert (self.table is not None) == (self.coding == Coding.TABLE)
        assert self.table is None or (self.table.shape == (16,) and self.table.dtype == torch.float32)

    def unpacked(self) -> Tensor:
        """The weight, float32 [..., N, K], its columns in the order of x's: what the twins multiply by."""
        codes = self.codes
        if self.bits == 4:
            runs = codes.unflatten(-1, (-1, _RUN // 2))
            codes = torch.cat((runs & 15, runs >> 4), dim=-1).flatten(-2)
        wide = self._numbers_of(codes[..., : self.k])
        group = self.group or self.k
        scales, zeros, offsets = (
            None if part is None else part.float().mT.repeat_interleave(group, dim=-1)[..., : self.k]
            for part in (self.scales, self.zeros, self.offsets)
        )
        assert scales is not None
        wide = (wide if zeros is None else wide - zeros) * scales
        wide = wide if offsets is None else wide + offsets
        if self.order is None:
            return wide
        return torch.empty_like(wide).scatter_(-1, self.order.long()[..., None, :].expand_as(wide), wide)

    def _numbers_of(self, codes: Tensor) -> Tensor:
        """codes: [..., K], one a byte. Returns float32."""
        match self.coding:
            case Coding.E2M1:
                return torch.tensor(_E2M1, device=codes.device)[codes.int()]
            case Coding.TABLE:
                assert self.table is not None
                return self.table[codes.int()]
            case Coding.E4M3:
                return codes.view(torch.float8_e4m3fn).float()
            case Coding.WHOLE:
                return codes.float() - 8 if self.bits == 4 else codes.float()


def pack(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group: int,
    order: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    coding: Coding = Coding.WHOLE,
    table: Tensor | None = None,
) -> PackedWeight:
    """codes: [..., N, K] uint8, below 2^bits; scales, zeros, offsets: [..., groups, N], zeros as whole codes.

    Zeros that are all 2^(bits - 1) (symmetric checkpoints), or none, are dropped: so whole numbers begin at
    -2^(bits - 1). The others: as PackedWeight has them.
    """
    middle, k = 1 << (bits - 1), codes.shape[-1]
    padded = pad(codes, (0, -k % _RUN))
    if bits == 4:
        low, high = padded.unflatten(-1, (-1, 2, _RUN // 2)).unbind(-2)
        padded = (low | (high << 4)).flatten(-2)
    elif coding == Coding.WHOLE:
        padded = (padded ^ middle).view(torch.int8)
    if zeros is not None:
        zeros = (zeros.to(torch.int16) - middle).contiguous()
        zeros = zeros if bool(zeros.any()) else None
    spreads = (scales.contiguous(), zeros, order, bits, group, k, None if offsets is None else offsets.contiguous())
    weight = PackedWeight(padded.contiguous(), *spreads, coding, table)
    weight.check()
    return weight


def zeros_of(scales: Tensor, offsets: Tensor, bits: int) -> Tensor | None:
    """scales, offsets: float32 [..., groups, N]. Returns int16 whole numbers whose products with the scales are the
    offsets negated; None: there are none that kernels take from numbers of so many bits without rounding."""
    zeros = torch.where(scales == 0, 0.0, -offsets / torch.where(scales == 0, 1.0, scales)).round()
    is_exact = torch.equal(-zeros * scales, offsets) and bool((zeros.abs() <= 1 << (bits - 1)).all())
    return zeros.to(torch.int16) if is_exact else None


def compact(scales: Tensor) -> Tensor:
    """scales: float32. Returns them in 16 bits where that changes none."""
    for dtype in _COMPACT:
        if torch.equal((small := scales.to(dtype)).float(), scales):
            return small
    return scales


def spreads_of(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments of a kernel that multiplies by `weight`: scales, zeros, offsets and table, or what stands
    for those that it has not."""
    scales = weight.scales
    zeros, offsets, table = (scales if of is None else of for of in (weight.zeros, weight.offsets, weight.table))
    return scales, zeros, offsets, table


def constants_of(weight: PackedWeight) -> dict[str, int]:
    """Return constants of such a kernel, by name."""
    return {
        "CODING": int(weight.coding),
        "BITS": weight.bits,
        "GROUP": weight.group,
        "SCALES_FIRST": weight.is_scaled_first,
        "HAS_ZEROS": weight.zeros is not None,
        "HAS_OFFSETS": weight.offsets is not None,
    }
