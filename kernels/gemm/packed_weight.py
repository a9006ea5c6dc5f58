"""Weights of 4 or 8 bits in the layout of this folder's kernels, and how GPTQ's and AWQ's checkpoints come into it.

A checkpoint's layout is undone once, when it is loaded. Ours: a weight is [N, K], each row's codes side by side, for
the shared axis of a product is contiguous in both of its factors. Of 4 bits, a byte holds the codes of k (low) and
k + 16 (high) in each run of 32: each half of a tile's bytes then meets columns of x that lie side by side, and no code
changes the thread that loaded it. Rows that GPTQ's act-order scattered over groups are brought together; `order` says
which column of x each then meets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

_RUN = 32  # codes of one interleaved run: the smallest group, and the smallest step of a kernel along K
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns the nibbles of a word hold, lowest first


@dataclass(frozen=True)
class PackedWeight:
    """Weight [..., N, K]: (code - 2^(bits - 1) - zero) * scale of its group. Leading axes: experts, or none."""

    codes: Tensor  # [..., N, ceil(K / 32) * 4 * bits] contiguous: uint8 of 4 bits, or int8, the code less 128
    scales: Tensor  # [..., groups, N] contiguous, floating
    zeros: Tensor | None  # [..., groups, N] contiguous int16; None: all 0
    order: Tensor | None  # [..., K] int32 contiguous: row k of the transposed weight meets column order[k] of x
    bits: int  # 4 or 8
    group: int  # along K, a multiple of 32, the last may be shorter; 0: one group
    k: int

    @property
    def num_columns(self) -> int:
        return self.codes.shape[-2]

    def check(self) -> None:
        """Raises AssertionError where a tensor is not what the kernels take it for."""
        lead, n = self.codes.shape[:-2], self.num_columns
        groups = -(-self.k // self.group) if self.group else 1
        assert self.bits in (4, 8) and self.group % _RUN == 0 and self.k > 0
        assert self.codes.dtype == (torch.uint8 if self.bits == 4 else torch.int8)
        assert self.codes.shape[-1] == -(-self.k // _RUN) * _RUN * self.bits // 8 and self.codes.is_contiguous()
        assert self.scales.shape == (*lead, groups, n) and self.scales.is_contiguous()
        if self.zeros is not None:
            assert self.zeros.shape == self.scales.shape and self.zeros.dtype == torch.int16
            assert self.zeros.is_contiguous()
        if self.order is not None:
            assert self.order.shape == (*lead, self.k) and self.order.dtype == torch.int32
            assert self.order.is_contiguous()

    def unpacked(self) -> Tensor:
        """The weight, float32 [..., N, K], its columns in the order of x's: what the twins multiply by."""
        if self.bits == 4:
            runs = self.codes.unflatten(-1, (-1, _RUN // 2))
            codes = torch.cat((runs & 15, runs >> 4), dim=-1).flatten(-2).to(torch.int16) - 8
        else:
            codes = self.codes.to(torch.int16)
        group = self.group or self.k
        scales, zeros = (
            None if part is None else part.float().mT.repeat_interleave(group, dim=-1)[..., : self.k]
            for part in (self.scales, self.zeros)
        )
        assert scales is not None
        wide = codes[..., : self.k].float()
        wide = (wide if zeros is None else wide - zeros) * scales
        if self.order is None:
            return wide
        return torch.empty_like(wide).scatter_(-1, self.order.long()[..., None, :].expand_as(wide), wide)


def pack(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int, order: Tensor | None = None
) -> PackedWeight:
    """codes: [..., N, K] uint8, below 2^bits; scales, zeros: [..., groups, N], zeros whole numbers.

    Zeros that are all 2^(bits - 1) (symmetric checkpoints) are dropped. order: as PackedWeight's.
    """
    middle, k = 1 << (bits - 1), codes.shape[-1]
    padded = pad(codes, (0, -k % _RUN))
    if bits == 4:
        low, high = padded.unflatten(-1, (-1, 2, _RUN // 2)).unbind(-2)
        packed = (low | (high << 4)).flatten(-2)
    else:
        packed = (padded.to(torch.int16) - middle).to(torch.int8)
    if zeros is not None:
        zeros = (zeros.to(torch.int16) - middle).contiguous()
        zeros = zeros if bool(zeros.any()) else None
    weight = PackedWeight(packed.contiguous(), scales.contiguous(), zeros, order, bits, group, k)
    weight.check()
    return weight


def from_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None,
    bits: int,
    group: int,
    zeros_are_one_less: bool = True,
) -> PackedWeight:
    """A GPTQ checkpoint's tensors (Frantar et al. 2022; AutoGPTQ's layout).

    qweight: [K * bits / 32, N] int32, codes along K, lowest bits first; qzeros: [groups, N * bits / 32] int32, along N;
    scales: [groups, N]; g_idx: [K] int32, the group of each row, None where rows are in order. group: -1 for one.
    zeros_are_one_less: of the first format; those of "gptq_v2" are as they are meant.
    Raises ValueError where the tensors do not belong together.
    """
    codes = _split(qweight, bits, dim=0).mT
    zeros = _split(qzeros, bits, dim=1).to(torch.int16) + int(zeros_are_one_less)
    k = codes.shape[1]
    group = 0 if group in (-1, k) else group
    _check_groups(k, group, scales, zeros)
    order = None
    if g_idx is not None and group and not torch.equal(g_idx.long(), torch.arange(k, device=g_idx.device) // group):
        sizes = torch.bincount(g_idx.long(), minlength=scales.shape[0])
        if not bool((sizes[:-1] == group).all()) or sizes.numel() != scales.shape[0]:
            raise ValueError(f"g_idx gives groups of {sizes.tolist()} rows where {group} are said: load it unsharded")
        order = torch.argsort(g_idx.long(), stable=True)
        codes = codes[:, order]
        order = order.int()
    return pack(codes, scales, zeros, bits, group, order)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int) -> PackedWeight:
    """An AWQ checkpoint's tensors of 4 bits (Lin et al. 2023; AutoAWQ's "gemm" layout).

    qweight: [K, N / 8] int32 and qzeros: [groups, N / 8] int32, along N in AWQ's order; scales: [groups, N].
    group: -1 for one. Raises ValueError where the tensors do not belong together.
    """
    place = torch.tensor([_AWQ_ORDER.index(i) for i in range(8)], device=qweight.device)

    def split(words: Tensor) -> Tensor:
        return _split(words, 4, dim=1).unflatten(1, (-1, 8))[:, :, place].flatten(1)

    codes, zeros = split(qweight).mT, split(qzeros)
    group = 0 if group in (-1, codes.shape[1]) else group
    _check_groups(codes.shape[1], group, scales, zeros)
    return pack(codes, scales, zeros, 4, group)


def _split(words: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words into the codes that they hold, lowest bits first, along `dim` (0 or 1). Returns uint8."""
    shifts = torch.arange(0, 32, bits, device=words.device)
    codes = (words.unsqueeze(dim + 1) >> (shifts[:, None] if dim == 0 else shifts)) & ((1 << bits) - 1)
    return codes.flatten(dim, dim + 1).to(torch.uint8)


def _check_groups(k: int, group: int, scales: Tensor, zeros: Tensor) -> None:
    groups = -(-k // group) if group else 1
    if group % _RUN or group < 0:
        raise ValueError(f"groups of {group} weights: the kernels take multiples of {_RUN}, or one group")
    if scales.shape[0] != groups or zeros.shape != scales.shape:
        raise ValueError(
            f"scales {tuple(scales.shape)} and zero points {tuple(zeros.shape)} for {k} inputs in {groups} groups"
        )
