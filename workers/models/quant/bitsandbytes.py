"""Weights of bitsandbytes checkpoints: NF4 and FP4 (QLoRA, arXiv 2305.14314, section 3) and int8 (LLM.int8(), arXiv
2208.07339).

    4 bits  weight uint8 [n k / 2, 1], high nibble first; weight.quant_map float32 [16]: what each nibble means;
            weight.absmax: a scale for each block of numbers, as they lie in memory; float32, or uint8 that stand for
            weight.nested_quant_map [256] x weight.nested_absmax of a block of scales + an offset;
            weight.quant_state.bitsandbytes__{nf4,fp4}: sizes and the offset, as JSON
    int8    weight int8 [n, k]; SCB float32 [n]: the largest magnitude of each row, which is 127
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....kernels.cpu.formats import Format, NumberLayout
from ....kernels.cpu.linear import WeightNumbers
from ...common.errors import CheckpointError
from ..families.quantisation import BitsAndBytes
from ..plan.number_layouts import in_blocks
from ..plan.tensor_names import Shape
from .stored_weight import FLOATS, StoredNumbers, StoredTensors, StoredWeight, checked_scales, need, some_rows, whole

MAX_STATE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class BitsAndBytesFormat:
    """A WeightFormat."""

    config: BitsAndBytes

    def find(self, tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight | None:
        if len(shape) != 2 or (header := tensors.header(name)) is None or header.dtype not in ("I8", "U8"):
            return None
        return self._int8(tensors, name, shape) if header.dtype == "I8" else _four_bits(tensors, name, shape)

    def is_spare(self, _tensors: StoredTensors, name: str, /) -> bool:
        return name.endswith(".weight_format")

    def _int8(self, tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight:
        scale_name = f"{name.removesuffix('.weight')}.SCB"
        need(tensors, name, [shape], ["I8"])
        need(tensors, scale_name, [(shape[0],)], ["F32"])
        order_name = f"{name.removesuffix('.weight')}.weight_format"
        if tensors.header(order_name) is not None and whole(tensors, order_name).any():
            raise CheckpointError(
                f"{tensors.where(order_name)}: tensor {order_name} must be 0 (rows): weights in the order of a kind of "
                "GPU (col32, col_turing, col_ampere) are not read. Save the model again by a newer bitsandbytes"
            )

        def numbers(_: tuple[int, ...], of: slice) -> WeightNumbers:
            scales = checked_scales(tensors, scale_name, some_rows(tensors, scale_name, of)) / 127
            return WeightNumbers(some_rows(tensors, name, of), scales[:, None])

        def rows(of: slice) -> Tensor:
            found = numbers((), of)
            return found.numbers.float().mul_(found.scales)

        stored = StoredNumbers(NumberLayout(Format.INT8, shape[1]), numbers)
        return StoredWeight(shape, (name, scale_name), rows, stored)


@dataclass(frozen=True, slots=True)
class _State:
    """Sizes and offset in a `quant_state`."""

    block: int  # numbers that share a scale
    nested_block: int  # scales that share one; 0: they are float32
    offset: float  # of nested scales

    @classmethod
    def read(cls, tensors: StoredTensors, name: str, shape: Shape) -> "_State":
        """Raises CheckpointError."""
        header = tensors.header(name)
        assert header is not None
        if header.dtype != "U8" or math.prod(header.shape) > MAX_STATE_BYTES:
            raise _unsound(tensors, name, "is no JSON text")
        try:
            values: dict[str, Any] = dict(json.loads(bytes(whole(tensors, name).tolist())))
            is_nested = "nested_blocksize" in values
            found = cls(
                int(values["blocksize"]),
                int(values["nested_blocksize"]) if is_nested else 0,
                float(values.get("nested_offset", 0.0)),
            )
            stored = tuple(values["shape"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as e:
            raise _unsound(tensors, name, f"has no sizes ({e!r})") from e
        if stored != shape or found.block <= 0 or found.nested_block < 0 or not math.isfinite(found.offset):
            raise _unsound(tensors, name, f"must be of shape {list(shape)}, found {values}")
        return found


def _four_bits(tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight:
    states = [f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
    state_name = next((of for of in states if tensors.header(of) is not None), None)
    if state_name is None:
        raise CheckpointError(f"{tensors.where(name)}: tensor {states[0]} is in none of its files")
    state, (n, k) = _State.read(tensors, state_name, shape), shape
    if k % 2:
        raise CheckpointError(f"{tensors.where(name)}: weight {name} has {k} inputs, an odd number, in 4 bits")
    num_blocks = -(-n * k // state.block)
    map_name, scale_name = f"{name}.quant_map", f"{name}.absmax"
    names = [name, state_name, map_name, scale_name]
    need(tensors, name, [(n * k // 2, 1)], ["U8"])
    need(tensors, map_name, [(16,)], FLOATS)
    need(tensors, scale_name, [(num_blocks,)], ["U8"] if state.nested_block else ["F32"])
    if state.nested_block:
        names += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
        need(tensors, names[-2], [(-(-num_blocks // state.nested_block),)], ["F32"])
        need(tensors, names[-1], [(256,)], ["F32"])

    def scales(blocks: slice) -> Tensor:
        stored = some_rows(tensors, scale_name, blocks)
        if state.nested_block:
            nested, means = (checked_scales(tensors, of, whole(tensors, of)) for of in names[-2:])
            of_each = nested[torch.arange(blocks.start, blocks.stop) // state.nested_block]
            stored = means[stored.int()] * of_each + state.offset
        return checked_scales(tensors, scale_name, stored)

    def meant() -> Tensor:
        return checked_scales(tensors, map_name, whole(tensors, map_name))

    def codes(of: slice) -> Tensor:
        packed = some_rows(tensors, name, slice(of.start * k // 2, of.stop * k // 2)).flatten()
        return torch.stack((packed >> 4, packed & 15), dim=1).flatten()

    def rows(of: slice) -> Tensor:
        numbers = meant()[codes(of).int()]
        blocks = slice(of.start * k // state.block, -(-of.stop * k // state.block))
        if k % state.block == 0:
            return numbers.view(-1, state.block).mul_(scales(blocks)[:, None]).view(-1, k)
        of_number = torch.arange(of.start * k, of.stop * k) // state.block - blocks.start
        return numbers.mul_(scales(blocks)[of_number]).view(-1, k)

    def numbers(_: tuple[int, ...], of: slice) -> WeightNumbers:
        blocks = slice(of.start * k // state.block, of.stop * k // state.block)
        stored = codes(of).view(-1, k).view(torch.int8)
        return WeightNumbers(stored, scales(blocks).view(-1, k // state.block), None, meant())

    layout = in_blocks(k, state.block)
    return StoredWeight(shape, tuple(names), rows, None if layout is None else StoredNumbers(layout, numbers))


def _unsound(tensors: StoredTensors, name: str, why: str) -> CheckpointError:
    return CheckpointError(f"{tensors.where(name)}: tensor {name} {why}: fetch the checkpoint again")
