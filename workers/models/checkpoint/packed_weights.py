"""Weights of products as a GPU's kernels read them (kernels/gemm/linear.py).

    numbers of the checkpoint, on the host ─> the device ─> packed      what may be kept as it is stored
    a weight on the device ─> rounded ─> packed                         `quantize`
    a weight on the device                                              others

A mixture's experts are packed one after another, each into the memory of all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace

import torch
from torch import Tensor

from ....kernels.common.tuning import chip_of
from ....kernels.cpu.formats import Format, NumberLayout, group_of
from ....kernels.cpu.linear import WeightNumbers
from ....kernels.gemm.linear import Weight
from ....kernels.gemm.packed_weight import Coding, PackedWeight, compact, pack, zeros_of
from ....kernels.gemm.quantise_rows import SCALE_BLOCK
from ....kernels.gemm.scaled_gemm import ScaledWeight
from ..plan.formats import DECODED_ON_GPUS, IN_LAYERS
from ..rounding import e2m1
from ..rounding.stored import numbers_of
from .weights import LayerTensors, LayerWeights

_PRODUCTS = {*IN_LAYERS, "lm_head"} - set(DECODED_ON_GPUS)
_BITS = {Format.INT8: 8, Format.INT4: 4, Format.TABLE4: 4, Format.FP8: 8}


def read_weight(fields: LayerTensors, name: str) -> Weight:
    """Read field `name`, which exists. A ReadWeight of load_weights."""
    if name not in _PRODUCTS or (fields.layout(name) is None and fields.format(name) == Format.PLAIN):
        return fields.decoded(name)
    experts = fields.experts(name)
    if not experts:
        return _compacted(_packed(fields, name, quantises_rows=True))
    for quantises_rows in (True, False):
        parts = (_packed(fields.of_expert(of), name, quantises_rows=quantises_rows) for of in experts)
        if (stacked := _stacked(parts, len(experts))) is not None:
            return _compacted(stacked)
    raise AssertionError("experts that are all packed are alike")


def rounded(weight: Tensor, layout: NumberLayout) -> Weight:
    """Pack a weight [n, k], or those of experts [E, n, k], that is rounded to nearest; `layout`: as group_of has it."""
    if weight.dim() == 2:
        return _compacted(_rounded(weight, layout))
    parts = (_rounded(of, layout) for of in weight)
    stacked = _stacked(parts, len(weight))
    assert stacked is not None
    return _compacted(stacked)


def _packed(fields: LayerTensors, name: str, *, quantises_rows: bool) -> ScaledWeight | PackedWeight:
    layout = fields.layout(name)
    if layout is not None:
        return packed_numbers(fields.numbers(name, layout), layout, fields.device, quantises_rows=quantises_rows)
    weight, format = fields.tensor(name), fields.format(name)
    layout = NumberLayout(format, group_of(format, weight.shape[-1]))
    return _rounded(weight.view(-1, weight.shape[-1]), layout, fields.scales(name))


def _rounded(weight: Tensor, layout: NumberLayout, scales: Tensor | None = None) -> ScaledWeight | PackedWeight:
    """weight: [n, k]. scales: as numbers_of has them."""
    return packed_numbers([numbers_of(weight, layout.format, scales)], layout, weight.device)


def packed_numbers(
    parts: Sequence[WeightNumbers], layout: NumberLayout, device: torch.device, *, quantises_rows: bool = True
) -> ScaledWeight | PackedWeight:
    """Pack the weight [n, k] that the parts, which have `layout`, are below one another.

    quantises_rows: FP8 that was made for rows of FP8 is multiplied by them, where the device can and scales are of
    outputs or of blocks; else it is widened.
    """
    numbers = torch.cat([of.numbers.to(device) for of in parts])
    scales = torch.cat([of.scales.to(device) for of in parts])
    k, first = numbers.shape[1], parts[0]
    group = layout.group if layout.group < k else 0
    if layout.format == Format.W8A8:
        return ScaledWeight(numbers, scales[:, 0].contiguous())
    if layout.has_fp8_rows and quantises_rows and chip_of(device).has_fp8_products:
        found = _fp8(numbers, scales, group)
        if found is not None:
            return found
    bits, coding, table = _BITS[layout.format], Coding.WHOLE, None
    if layout.format == Format.FP8:
        coding = Coding.E4M3
    elif layout.format == Format.TABLE4:
        assert first.table is not None
        is_e2m1 = torch.equal(first.table.cpu(), e2m1.values(torch.arange(16, dtype=torch.uint8)))
        coding, table = (Coding.E2M1, None) if is_e2m1 else (Coding.TABLE, first.table.float().to(device))
    scales, zeros, offsets = scales.mT.contiguous(), None, _offsets(parts, device)
    if offsets is not None and coding == Coding.WHOLE and (whole := zeros_of(scales, offsets, bits)) is not None:
        zeros, offsets = whole + (1 << (bits - 1)), None
    order = None if first.order is None else first.order.to(device, torch.int32)
    codes = _codes(numbers, bits, coding)
    return pack(codes, scales, zeros, bits, group, order, offsets=offsets, coding=coding, table=table)


def _codes(numbers: Tensor, bits: int, coding: Coding) -> Tensor:
    """numbers: int8 [n, k], of 4 bits the lowest four count. Returns them as `pack` takes them."""
    codes = numbers.view(torch.uint8)
    if coding == Coding.WHOLE:
        codes = codes + (1 << (bits - 1))  # overflows of a byte are meant
    return codes & 15 if bits == 4 else codes


def _offsets(parts: Sequence[WeightNumbers], device: torch.device) -> Tensor | None:
    """Return those of the parts below one another, [groups, n] float32."""
    found = [of.offsets.to(device) for of in parts if of.offsets is not None]
    assert len(found) in (0, len(parts))
    return torch.cat(found).mT.contiguous() if found else None


def _fp8(numbers: Tensor, scales: Tensor, group: int) -> ScaledWeight | None:
    """numbers: e4m3 as int8 [n, k]; scales: float32 [n, groups]. Returns None where scales are others than of outputs
    or of blocks of SCALE_BLOCK outputs and inputs."""
    values = numbers.view(torch.float8_e4m3fn)
    if not group:
        return ScaledWeight(values, scales[:, 0].contiguous())
    of_blocks = scales[::SCALE_BLOCK].contiguous()
    is_spread = torch.equal(of_blocks.repeat_interleave(SCALE_BLOCK, dim=0)[: len(scales)], scales)
    return ScaledWeight(values, of_blocks) if group == SCALE_BLOCK and is_spread else None


def _stacked(weights: Iterator[ScaledWeight | PackedWeight], num: int) -> ScaledWeight | PackedWeight | None:
    """Return `num` weights of one shape along a first axis; None: they are not of one class."""
    first, stacks = None, dict[str, Tensor]()
    for index, weight in enumerate(weights):
        first = weight if first is None else first
        if type(weight) is not type(first):
            return None
        for name, own in _tensors_of(weight).items():
            if name not in stacks:  # zeros and offsets may begin with any; 0 is none
                stacks[name] = own.new_zeros((num, *own.shape))
                if name == "order":
                    stacks[name][:] = torch.arange(own.shape[0], device=own.device)
            stacks[name][index] = own
    assert first is not None
    return replace(first, **stacks)


def _tensors_of(weight: ScaledWeight | PackedWeight) -> dict[str, Tensor]:
    """Return the tensors that each expert has of its own."""
    found = {of.name: getattr(weight, of.name) for of in fields_of(weight) if of.name != "table"}
    return {name: of for name, of in found.items() if isinstance(of, Tensor)}


def _compacted(weight: ScaledWeight | PackedWeight) -> ScaledWeight | PackedWeight:
    if isinstance(weight, ScaledWeight):
        return weight
    offsets = None if weight.offsets is None else compact(weight.offsets)
    return replace(weight, scales=compact(weight.scales), offsets=offsets)


def products_of(layer: LayerWeights) -> Iterator[Weight]:
    """Yield the weights of a layer's products."""
    for name in IN_LAYERS:
        if name not in DECODED_ON_GPUS and (weight := getattr(layer, name)) is not None:
            yield weight
