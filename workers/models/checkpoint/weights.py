"""Reads a Hugging Face safetensors checkpoint into the tensors of a decoder.

Life of a load: open and check what is stored (checkpoint_files.py), and only then copy tensor by tensor, fused and
converted, reporting progress. Whatever is wrong with a checkpoint is found before a weight is read, and named.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....kernels.cpu.formats import Format, NumberLayout
from ....kernels.cpu.linear import WeightNumbers
from ....kernels.gemm.linear import Weight
from ....kernels.moe.expert_library import ExpertLibraries
from ...common.memory import huge_page_mapping
from ..plan.formats import format_of
from ..plan.kept_numbers import described, kept_layout
from ..plan.sharding import WHOLE, Share, layer_fields, part_of_piece, rows_and_inputs, shape_of_part, stored_part
from ..plan.tensor_names import Piece, Pieces, outer_tensors
from ..rounding.numbers import regrouped
from ..rounding.stored import as_stored_, scales_of_part
from ..rounding.w8a8 import RowsQuantised
from .checkpoint_files import CheckpointFiles

Progress = Callable[[int, int], None]  # bytes done, bytes in all
# Copies a tensor as stored into a contiguous one of its shape, on whatever device, of whatever dtype, and tells of the
# bytes that it is done with. It may still be under way when it returns: see device/upload.py.
Put = Callable[[Tensor, Tensor, Callable[[int], object]], object]
ALIGNMENT = 64  # of copies, in bytes
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(slots=True)
class LayerWeights:
    """Weights of a layer. H hidden, I intermediate, D head_dim, N query heads, K key-value heads, E experts; of latent
    attention q_rank and kv_rank, R rotated and D other numbers of a query, V of a value; of token inputs P."""

    # [(N + 2K) D, H]: queries, keys, values; [N D, H] where KV is another layer's. Latent: [q_rank (or N (D + R)) +
    # kv_rank + R, H]: latents of queries (or these), latents, rotated keys.
    qkv: Weight
    o: Weight  # [H, N D]; latent: [H, N V]
    gate_up: Weight | None = None  # [2I, H]: gate, up
    down: Weight | None = None  # [H, I]
    input_norm: Tensor | None = None  # [H], before attention
    attention_out_norm: Tensor | None = None  # [H], after it
    mlp_norm: Tensor | None = None  # [H], before the MLP
    mlp_out_norm: Tensor | None = None  # [H], after it
    # For an MLP beside experts: `mlp_norm` is before it, `mlp_out_norm` after the sum of both.
    beside_out_norm: Tensor | None = None  # [H], only after it
    experts_norm: Tensor | None = None  # [H], before the experts
    experts_out_norm: Tensor | None = None  # [H], after them
    sinks: Tensor | None = None  # [N] float32
    q_norm: Tensor | None = None  # [D]; latent: [q_rank]
    k_norm: Tensor | None = None  # [D]; latent: [kv_rank]
    q_b: Weight | None = None  # [N (D + R), q_rank]
    kv_b: Tensor | None = None  # [N (D + V), kv_rank], of each head what makes its keys, then its values
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    router: Tensor | None = None  # [E, H] float32
    router_norm: Tensor | None = None  # [H], before it
    router_bias: Tensor | None = None  # [E] float32
    choice_bias: Tensor | None = None  # [E] float32
    expert_scales: Tensor | None = None  # [E] float32
    experts_gate_up: Weight | None = None  # [E, 2I, H]: of each, gate, up; but for experts_up_first
    experts_libraries: ExpertLibraries | None = None
    experts_down: Weight | None = None  # [E, H, I]
    experts_gate_up_bias: Tensor | None = None  # [E, 2I]
    experts_down_bias: Tensor | None = None  # [E, H]
    shared_gate_up: Weight | None = None  # as gate_up, of the experts that every token has
    shared_down: Weight | None = None
    token_gate: Tensor | None = None  # [P, H]
    token_out: Tensor | None = None  # [H, P]
    token_out_norm: Tensor | None = None  # [H]
    scale: Tensor | None = None  # [1]: of the residual that the layer leaves

    @property
    def experts_up_first(self) -> bool:  # as such a library asks
        return any(library is not None and library.has_up_first for _, library in self.experts_libraries or ())


@dataclass(slots=True)
class DecoderWeights:
    """Weights of a share, which holds the part `vocab` of the vocabulary, and `token_vocab`, which may be larger, of
    the token inputs' one."""

    embed: Tensor  # [vocab, H]
    layers: list[LayerWeights]
    norm: Tensor  # [H]
    lm_head: Weight  # [vocab, H]; the same tensor as `embed` where they are tied
    token_embed: Tensor | None = None  # [token_vocab, layers * P], of token inputs
    token_mix: Tensor | None = None  # [layers * P, H]
    token_mix_norm: Tensor | None = None  # [P]


def put_now(target: Tensor, stored: Tensor, copied: Callable[[int], object]) -> None:
    """A Put."""
    target.copy_(stored)
    copied(stored.nbytes)


class Checkpoint(CheckpointFiles):
    """A checkpoint whose tensors are copied into a decoder's."""

    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress = lambda _done, _total: None,
        share: Share = WHOLE,
        quantize: str | None = None,
    ) -> DecoderWeights:
        """Copy what `share` holds of every tensor to `device` as `dtype`, those of a fused weight below one another."""
        return load_weights(self.reader(dtype, device, progress, share, quantize))

    def reader(
        self,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress = lambda _done, _total: None,
        share: Share = WHOLE,
        quantize: str | None = None,
        put: Put = put_now,
    ) -> "WeightReader":
        """Return a reader for callers that convert tensors otherwise than `load` does. quantize: see plan/formats.py;
        it needs what was put at once."""
        return WeightReader(self, dtype, device, progress, share, quantize, put)

    def read(self, piece: Piece, share: Share) -> Tensor:
        """Read the part of a piece that `share` holds; on CPU, in the stored dtype unless it has an offset."""
        part = stored_part(piece, share)
        stored = self.stored(piece.name, part)
        if piece.transposed:
            stored = stored.mT
        if piece.order:
            heads = stored.reshape(-1, len(piece.order), *stored.shape[1:])
            stored = heads[:, list(piece.order)].reshape(stored.shape)
        return stored.float() + piece.offset if piece.offset else stored

    def read_numbers(self, piece: Piece, share: Share, layout: NumberLayout) -> WeightNumbers:
        """Read the same part in the numbers that it is stored as, with the scales that `layout` has."""
        index, rows, part = rows_and_inputs(piece, share)
        stored = self.numbers(piece.name)
        of, group, k = stored.read(index, rows), stored.layout.group, piece.own_shape[1]
        inputs = range(k)[part]
        offsets = torch.zeros_like(of.scales) if layout.has_offsets and of.offsets is None else of.offsets
        scales, spread = of.scales, None if offsets is None else regrouped(offsets, group, inputs, layout.group)
        regrouped_scales = regrouped(scales, group, inputs, layout.group)
        found = WeightNumbers(of.numbers[:, part], regrouped_scales, spread, of.table, of.order)
        return found if not piece.order else _in_order(found, piece.order)


def _in_order(of: WeightNumbers, order: tuple[int, ...]) -> WeightNumbers:
    """order: of the rows of each head."""

    def ordered(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, len(order)))[:, list(order)].flatten(0, 1)

    offsets = None if of.offsets is None else ordered(of.offsets)
    return WeightNumbers(ordered(of.numbers), ordered(of.scales), offsets, of.table, of.order)


class WeightReader:
    """Copies what one share of a decoder needs out of a checkpoint, layer by layer, and counts."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        share: Share,
        quantize: str | None = None,
        put: Put = put_now,
    ) -> None:
        assert quantize is None or put is put_now
        self.quantize = quantize
        self.spec = checkpoint.spec
        self._layouts = dict(checkpoint.layouts)
        self.dtype = dtype
        self._checkpoint, self.device, self._share = checkpoint, device, share
        self._progress, self._put = progress, put
        self._layers = [layer_fields(checkpoint.spec, i, share) for i in range(checkpoint.spec.num_layers)]
        self._outer = outer_tensors(checkpoint.spec, has_own_head=quantize is not None)
        self._done, self._total = 0, 0
        self._scratch = ConversionScratch()
        for fields in (*self._layers, self._outer):
            self._total += sum(self._bytes(piece) for pieces in fields.values() for piece in pieces)
            for pieces in fields.values():
                self._decode_unlike(pieces)

    def layers(self) -> "Iterator[LayerTensors]":
        self._progress(0, self._total)
        for fields in self._layers:
            yield LayerTensors(self, fields)
            self._checkpoint.let_go()

    def outer(self) -> "LayerTensors":
        return LayerTensors(self, self._outer)

    def parts(self, pieces: Pieces) -> list[Tensor]:
        """Return the parts on CPU, with contiguous rows: views of the file where that is possible, else in memory that
        the next call overwrites."""
        found: list[Tensor] = []
        self._scratch.clear()
        for piece in pieces:
            stored, dtype = self._read(piece), self._dtype_of(piece)
            is_ready = stored.dtype == dtype and stored.stride(-1) == 1
            found.append(stored if is_ready else self._scratch.copy(stored, dtype))
            self._count(stored.nbytes)
        return found

    def fused(self, pieces: Pieces) -> Tensor:
        """Return a field's pieces concatenated by rows; those of experts along a first axis of their own."""
        shapes = [shape_of_part(piece, self._share) for piece in pieces]
        rows, dtype = sum(s[0] for s in shapes), self._dtype_of(pieces[0])
        target = torch.empty((rows, *shapes[0][1:]), dtype=dtype, device=self.device)
        start = 0
        for piece, own in zip(pieces, shapes, strict=True):
            stored = self._read(piece)
            self._put(target[start : start + own[0]], stored, self._count)
            start += own[0]
        num_experts = len({piece.expert for piece in pieces})
        return target if pieces[0].expert is None else target.unflatten(0, (num_experts, -1))

    def scales(self, pieces: Pieces, format: Format) -> Tensor | None:
        """Return the scales of whole rows, where this share holds a part of their inputs; None: its rows are whole, or
        `format` has no scales. Reads one tensor whole at a time."""
        if format == Format.PLAIN or self._share == WHOLE or len(part_of_piece(pieces[0], self._share)) == 1:
            return None
        return torch.cat([self._scales(piece, format) for piece in pieces])

    def layout(self, field: str, pieces: Pieces) -> NumberLayout | None:
        """Return the layout in which the numbers of a field's pieces may be kept, as kept_numbers.py says."""
        return kept_layout(self._layouts, field, pieces, self._share, self.quantize)

    def numbers(self, pieces: Pieces, layout: NumberLayout) -> list[WeightNumbers]:
        """Return the numbers of pieces, which have `layout`."""
        found = [self._checkpoint.read_numbers(piece, self._share, layout) for piece in pieces]
        self._count(sum(map(self._bytes, pieces)))
        return found

    def describe(self) -> str | None:
        """Return a line about the numbers that products are computed in; None: the checkpoint is not quantised."""
        fields = (*self._layers, self._outer)
        return described(fields, self._layouts, self._share, self.quantize) if self._layouts else None

    def _decode_unlike(self, pieces: Pieces) -> None:
        """Leave to be decoded what is one product, and whose inputs stand in unlike orders. A mixture has a product for
        each expert."""
        first: dict[int | None, Tensor] = {}  # order, by expert
        for piece in pieces:
            if piece.name in self._layouts and self._layouts[piece.name].has_order:
                order = self._checkpoint.numbers(piece.name).order()
                if order is None or not torch.equal(first.setdefault(piece.expert, order), order):
                    for each in pieces:
                        self._layouts.pop(each.name, None)
                    return

    def _scales(self, piece: Piece, format: Format) -> Tensor:
        whole = self._checkpoint.read(piece, WHOLE).to(self.device, self.dtype)
        return scales_of_part(whole, format, part_of_piece(piece, self._share)[1])

    def _count(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._progress(self._done, self._total)

    def _dtype_of(self, piece: Piece) -> torch.dtype:
        return torch.float32 if piece.is_wide else self.dtype

    def _read(self, piece: Piece) -> Tensor:
        """Read the part of this share. Pieces with an offset are converted to the wanted dtype, so that one number says
        their bytes."""
        stored = self._checkpoint.read(piece, self._share)
        return stored.to(self._dtype_of(piece)) if piece.offset else stored

    def _bytes(self, piece: Piece) -> int:
        """Number of bytes of what `_read` returns."""
        size = self._dtype_of(piece).itemsize if piece.offset else self._checkpoint.stored_size(piece.name)
        return size * math.prod(shape_of_part(piece, self._share))


class ConversionScratch:
    """Memory for what is copied on its way, taken again and again. In a heap each copy leaves a hole; small things that
    stay take some of it, so that the next copy does not fit any more: the heap would grow with every layer."""

    def __init__(self) -> None:
        self._memory, self._used = torch.empty(0, dtype=torch.uint8), 0

    def clear(self) -> None:
        """Copies so far are of no more use."""
        self._used = 0

    def copy(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Contiguous. Raises ConfigError if the memory is not to be had."""
        num_bytes = tensor.numel() * dtype.itemsize
        if self._used + num_bytes > len(self._memory):  # the copies that have been made keep the memory they are in
            mapping = huge_page_mapping(max(num_bytes, 2 * len(self._memory)), "use a machine with more")
            self._memory, self._used = torch.frombuffer(mapping, dtype=torch.uint8), 0
        place = self._memory[self._used :][:num_bytes]
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return place.view(dtype).view(tensor.shape).copy_(tensor)


class LayerTensors:
    """The tensors of one layer, or of what is outside the layers, by the fields' names; each is read when asked for."""

    def __init__(self, reader: WeightReader, fields: dict[str, Pieces], whole: dict[str, Pieces] | None = None) -> None:
        """whole: fields that these are a part of."""
        self._reader, self._fields, self._whole = reader, fields, fields if whole is None else whole

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that products are computed in."""
        return self._reader.dtype

    @property
    def device(self) -> torch.device:
        """Device of the tensors that are read."""
        return self._reader.device

    def has(self, field: str) -> bool:
        return field in self._fields

    def parts(self, field: str) -> list[Tensor]:
        """The tensors that are below one another in `field`, which exists; valid until `parts` are asked for again."""
        return self._reader.parts(self._fields[field])

    def tensor(self, field: str) -> Tensor:
        """A `field` that exists."""
        return self._reader.fused(self._fields[field])

    def fused(self, field: str) -> Tensor | None:
        return self.tensor(field) if self.has(field) else None

    def of_expert(self, expert: int) -> "LayerTensors":
        """Return one expert's part of the experts' fields, under the same names."""
        own = {field: tuple(p for p in pieces if p.expert == expert) for field, pieces in self._fields.items()}
        return LayerTensors(self._reader, {field: pieces for field, pieces in own.items() if pieces}, self._whole)

    def experts(self, field: str) -> list[int]:
        """Return the experts that `field` has parts of, as they are numbered in the model; none: of a mixture's fields
        alone there are."""
        return list(dict.fromkeys(piece.expert for piece in self._fields[field] if piece.expert is not None))

    def as_layer(self, read: "ReadWeight | None" = None) -> LayerWeights:
        """read: None: as_stored."""
        fields: dict[str, Any] = {field: (read or LayerTensors.as_stored)(self, field) for field in self._fields}
        return LayerWeights(**fields)

    def layout(self, field: str) -> NumberLayout | None:
        """Return the layout of the numbers that `field` may be kept in; None: it is decoded, or not quantised."""
        return self._reader.layout(field, self._whole[field])

    def numbers(self, field: str, layout: NumberLayout) -> list[WeightNumbers]:
        """Read the numbers of `field`, which has `layout`."""
        return self._reader.numbers(self._fields[field], layout)

    def format(self, field: str) -> Format:
        """Return the format that `field` is converted to at load."""
        return Format.PLAIN if self.layout(field) is not None else format_of(self._reader.quantize, field)

    def scales(self, field: str) -> Tensor | None:
        """Return the scales with which the tensors of `field` are quantised, where they are not their own: float32 [n,
        groups]."""
        return self._reader.scales(self._fields[field], self.format(field))

    def decoded(self, field: str) -> Tensor:
        """A `field` that exists, as its format leaves it."""
        return as_stored_(self.tensor(field), self.format(field), self.scales(field))

    def as_stored(self, field: str) -> Tensor:
        """Read what `decoded` does; rows that a weight of W8A8 is multiplied by are quantised."""
        layout, found = self.layout(field), self.decoded(field)
        quantises_rows = Format.W8A8 in (self.format(field), layout and layout.format)
        return found.as_subclass(RowsQuantised) if quantises_rows else found


ReadWeight = Callable[[LayerTensors, str], Weight]  # a field that exists, as a backend computes with it


def load_weights(reader: WeightReader, read: ReadWeight = LayerTensors.as_stored) -> DecoderWeights:
    """read: of the layers' fields and the head."""
    layers = [fields.as_layer(read) for fields in reader.layers()]
    outer = reader.outer()
    embed = outer.tensor("embed")
    return DecoderWeights(
        embed,
        layers,
        norm=outer.tensor("norm"),
        lm_head=read(outer, "lm_head") if outer.has("lm_head") else embed,
        token_embed=outer.fused("token_embed"),
        token_mix=outer.fused("token_mix"),
        token_mix_norm=outer.fused("token_mix_norm"),
    )
