"""Weights of GGUF files: blocks of numbers (ggml_blocks.py), or floats, under llama.cpp's names (gguf_names.py).

All tensors of such a file pass here, quantised or not: the converter has turned rows, added 1 to norms, and stacked
experts, which is undone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.cpu.linear import WeightNumbers
from ...common.errors import CheckpointError
from ..families.quantisation import Gguf
from ..gguf.gguf_names import SPARE, GgufSource, gguf_source
from ..gguf.gguf_types import BLOCKS, FLOATS
from ..plan.ggml_layouts import GGML_LAYOUTS
from ..plan.tensor_names import Shape
from .ggml_blocks import decode_blocks, numbers_of_blocks
from .stored_weight import StoredNumbers, StoredTensors, StoredWeight, checked_scales


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """A WeightFormat."""

    config: Gguf

    def find(self, tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight | None:
        source = gguf_source(self.config.architecture, name)
        if source is None:
            return None
        if source.is_stacked:
            return _stacked(tensors, source, shape)
        (stored,) = source.names
        if source.by_head and tensors.header(stored) is None:
            return _by_head(tensors, source.by_head, shape)
        if source.expert is None:
            return _with_rows(tensors, source, stored, shape, self.config.head_dim)
        if tensors.header(stored) is None and tensors.header(source.by_expert) is not None:
            return _with_rows(tensors, source, source.by_expert, shape)
        return _of_expert(tensors, source, stored, shape)

    def is_spare(self, _tensors: StoredTensors, name: str, /) -> bool:
        return name in SPARE or name.endswith(".attn_rot_embd.weight")


def _with_rows(
    tensors: StoredTensors, source: GgufSource, stored: str, shape: Shape, head_dim: int = 0
) -> StoredWeight:
    """Find a tensor of a file that is one of the decoder. head_dim: of turned rows."""
    decode = _decoder(tensors, stored, shape)

    def rows(of: slice) -> Tensor:
        raw = _whole(tensors, stored)
        found = decode(raw[_places(of, head_dim)] if source.is_turned else raw[of])
        return found - 1.0 if source.is_shifted else found

    def numbers(_: tuple[int, ...], of: slice) -> WeightNumbers:
        raw = _whole(tensors, stored)
        return _numbers(tensors, stored, raw[_places(of, head_dim)] if source.is_turned else raw[of])

    return StoredWeight(shape, (stored,), rows, _stored_numbers(tensors, stored, numbers))


def _stored_numbers(
    tensors: StoredTensors, stored: str, read: Callable[[tuple[int, ...], slice], WeightNumbers]
) -> StoredNumbers | None:
    """Return the numbers of a tensor that is there; None: it is one of floats."""
    header = tensors.header(stored)
    assert header is not None
    return StoredNumbers(GGML_LAYOUTS[header.dtype], read) if header.dtype in BLOCKS else None


def _numbers(tensors: StoredTensors, stored: str, raw: Tensor) -> WeightNumbers:
    """raw: uint8 [n, bytes of a row] of a tensor of blocks. Raises CheckpointError for scales that are not finite."""
    header = tensors.header(stored)
    assert header is not None
    found = numbers_of_blocks(raw, BLOCKS[header.dtype])
    for of in (found.scales, found.offsets):
        if of is not None:
            checked_scales(tensors, stored, of)
    return found


def _places(of: slice, head_dim: int) -> Tensor:
    """Return the places, as stored, of rows of queries or keys: int64 [n]. There, rows that one angle rotates are
    neighbours; here they are half a head apart."""
    rows, half = torch.arange(of.start, of.stop), head_dim // 2
    head, of_head = rows // head_dim, rows % head_dim
    return head * head_dim + 2 * (of_head % half) + of_head // half


def _of_expert(tensors: StoredTensors, source: GgufSource, stored: str, shape: Shape) -> StoredWeight:
    """Find an expert's part of a tensor that has those of all."""
    header, expert = tensors.header(stored), source.expert
    assert expert is not None
    num = header.shape[0] if header is not None else expert + 1
    decode = _decoder(tensors, stored, (max(num, expert + 1), *shape))

    def numbers(_: tuple[int, ...], of: slice) -> WeightNumbers:
        return _numbers(tensors, stored, _whole(tensors, stored)[expert, of])

    found = None if header is None else _stored_numbers(tensors, stored, numbers)
    return StoredWeight(shape, (stored,), lambda of: decode(_whole(tensors, stored)[expert, of]), found)


def _by_head(tensors: StoredTensors, names: tuple[str, str], shape: Shape) -> StoredWeight:
    """Find what makes keys and values of latents, which are one tensor here: of each head, keys' rows, then values'."""
    rank = shape[1]
    keys, values = (_shape(tensors, name) for name in names)
    heads, key, value = keys[0], keys[-1], values[-2] if len(values) > 1 else 0
    if shape[0] != heads * (key + value):
        raise CheckpointError(
            f"{tensors.where(names[0])}: tensors {names[0]} and {names[1]} must have {shape[0]} outputs together, "
            f"found {list(keys)} and {list(values)}"
        )
    decode_keys = _decoder(tensors, names[0], (heads, rank, key))
    decode_values = _decoder(tensors, names[1], (heads, value, rank))

    def rows(of: slice) -> Tensor:
        first, last = of.start // (key + value), -(-of.stop // (key + value))
        own = slice(first, last)
        parts = decode_keys(_whole(tensors, names[0])[own]).mT, decode_values(_whole(tensors, names[1])[own])
        found = torch.cat(parts, dim=1).flatten(0, 1)
        return found[of.start - first * (key + value) :][: of.stop - of.start]

    return StoredWeight(shape, names, rows)


def _stacked(tensors: StoredTensors, source: GgufSource, shape: Shape) -> StoredWeight:
    """Find a tensor of all experts, inputs before outputs; of gate and up, their outputs in turn (gpt-oss)."""
    num, *axes = shape
    axes[-1] //= len(source.names)
    own = (num, *reversed(axes))
    decoders = [_decoder(tensors, stored, own) for stored in source.names]

    def rows(of: slice) -> Tensor:
        parts = [decode(_whole(tensors, stored)[of]) for decode, stored in zip(decoders, source.names, strict=True)]
        found = parts[0] if len(parts) == 1 else torch.stack(parts, dim=2).flatten(1, 2)
        return found.mT if len(axes) == 2 else found

    return StoredWeight(shape, source.names, rows)


def _decoder(tensors: StoredTensors, stored: str, shape: Shape) -> Callable[[Tensor], Tensor]:
    """Return what decodes a tensor, as stored, of that shape: some of its rows, of any axes before the last. Raises
    CheckpointError for one that is missing, or has another shape."""
    header, where = tensors.header(stored), tensors.where(stored)
    if header is None:
        raise CheckpointError(f"{where}: tensor {stored} of shape {list(shape)} is missing: fetch the file again")
    of, found = BLOCKS.get(header.dtype), _shape(tensors, stored)
    if found != shape:
        raise CheckpointError(
            f"{where}: tensor {stored} must have shape {list(shape)}, as the metadata says, found {list(found)}"
        )
    assert of is not None or header.dtype in FLOATS

    def decode(raw: Tensor) -> Tensor:
        if of is None:
            numbers = raw.float()
        else:
            flat = decode_blocks(raw.reshape(-1, raw.shape[-1]), of)
            numbers = flat.reshape(*raw.shape[:-1], shape[-1])
        if not torch.isfinite(numbers).all():
            raise CheckpointError(f"{where}: tensor {stored} has a number that is not finite: fetch the file again")
        return numbers

    return decode


def _shape(tensors: StoredTensors, stored: str) -> Shape:
    """Shape of a tensor's numbers. Raises CheckpointError for one that is missing."""
    header = tensors.header(stored)
    if header is None:
        raise CheckpointError(f"{tensors.where(stored)}: tensor {stored} is missing: fetch the file again")
    of = BLOCKS.get(header.dtype)
    return header.shape if of is None else (*header.shape[:-1], header.shape[-1] // of.num_bytes * of.block)


def _whole(tensors: StoredTensors, stored: str) -> Tensor:
    header = tensors.header(stored)
    assert header is not None
    return tensors.raw(stored, (slice(None),) * len(header.shape))
