"""A decoder's step in one foreign call: the structures of layer.h, what a step computes, and its buffers."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention.paged_batch import NO_OPTIONS, AttentionOptions
from ..kv.kivi import GROUP
from .attention import KIVI_FORMAT, AttentionLimits, AttentionScratch, Cache, Heads, Rope, SparseStruct
from .experts import ExpertMemory, ExpertRows, Experts, ExpertSizes, PackedMixture, row_stride
from .greedy import BEST, SCRATCH, TokenMasks
from .library import DTYPES, Team
from .linear import Epilogue, Linear, PackedLinear, address_of
from .routing import PackedRouting
from .sparse import SparseMemory

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
PARTS = ("begin", "norms", "qkv", "rope", "attention", "o", "router", "gate_up", "down", "head")  # Part of layer.h
_FEW_ROWS = 4
_LEAST = 64  # rows, sequences: buffers are not smaller
NO_BOUNDS: dict[int, Tensor] = {}
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


class Attention(ctypes.Structure):
    _fields_ = (("heads", Heads), ("rope", Rope), ("is_sparse", _L))


class Mixture(ctypes.Structure):
    _fields_ = (("router", Linear), ("routing", PackedRouting), ("experts", Experts), ("expert_tokens", _P))


class LayerStruct(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")),
        *((name, _P) for name in ("q_norm", "k_norm", "sinks")),
        *((name, Linear) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _P) for name in ("cache", "tail")),
        *((name, _L) for name in ("attention", "gate")),
        ("mixture", _P),
        ("bounds", _P),
    )


class DecoderStruct(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("layers", "attentions", "norm", "embed")),
        ("head", Linear),
        ("first_token", _L),
        *((name, _L) for name in ("num_layers", "num_attentions", "hidden_size", "block_stride", "block_size")),
        *((name, _F) for name in ("eps", "embed_scale", "logit_softcap")),
        *((name, _I) for name in ("dtype", "norms_whole_rows", "is_split", "kv_format")),
        ("tail_stride", _L),
    )


class TakenStruct(ctypes.Structure):
    """layer.h's struct Taken."""

    _fields_ = (("rows", _P), ("stride", _L), ("columns", _P), ("norm", _P))


class StepStruct(ctypes.Structure):
    _fields_ = (
        *((name, _L) for name in ("num_rows", "num_seqs")),
        *((name, _P) for name in ("token_ids", "num_new", "context_lens", "tables", "table_rows")),
        ("table_width", _L),
        *((name, _P) for name in ("tails", "sampled")),
        *((name, _L) for name in ("num_sampled", "num_kept")),
        *((name, _P) for name in ("query_starts", "block_tables")),
        ("block_table_width", _L),
        *((name, _P) for name in ("positions", "slots", "tail_starts", "num_filled", "filled")),
        *((name, _P) for name in ("residual", "normed", "qkv", "attended", "inner")),
        *((f"{name}_stride", _L) for name in ("normed", "attended", "inner")),
        ("router_logits", _P),
        ("expert_rows", ExpertRows),
        *((name, _P) for name in ("partial", "scratches")),
        ("limits", AttentionLimits),
        ("sparse", SparseStruct),
        ("logits", _P),
        ("picks", _L),
        *((name, _P) for name in ("masks", "ids", "bests", "few_logits", "nanoseconds")),
        ("taken", TakenStruct),
    )


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """A way to attend that layers share."""

    rope: Tensor  # [positions, R] float32, cosines first: the first R numbers of a head are rotated
    options: AttentionOptions = NO_OPTIONS  # without sinks, which differ between layers
    is_sparse: bool = False  # long contexts are attended to in part: its layers have bounds


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes and options of a decoder, of one rank's share."""

    block_size: int  # of the cache
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    eps: float
    dtype: torch.dtype
    attentions: tuple[AttentionKind, ...]
    first_token: int = 0  # the vocabulary's part is of the ids from this on
    embed_scale: float = 1.0  # of the embedded tokens
    logit_softcap: float = 0.0  # 0: none; else logits become softcap * tanh(logit / softcap)
    is_split: bool = False  # over several ranks, of which this is one
    leaves_halves: bool = False  # some layer norms its output before it is added to the residual
    experts: ExpertSizes | None = None  # of all layers that have a mixture
    num_experts: int = 0  # that a router chooses from
    num_chosen: int = 0  # blocks that a sparse decode attends to, where some attention is

    def heads(self, kind: AttentionKind) -> Heads:
        return Heads.of(self.num_heads, self.num_kv_heads, self.head_dim, kind.options)


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """H hidden, D head_dim, N query heads, K KV heads. Norms, float32: of what attention and the MLP read of the
    residual, and of what they add to it."""

    input_norm: Tensor | None  # [H]
    attention_out_norm: Tensor | None  # [H]
    mlp_norm: Tensor | None  # [H]
    mlp_out_norm: Tensor | None  # [H]
    q_norm: Tensor | None  # [D], or [N D]: of all heads of a row at once
    k_norm: Tensor | None  # [D] or [K D]
    sinks: Tensor | None  # [N] float32
    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear | None  # packed for its gate
    down: PackedLinear | None
    attention: int = 0  # which of the decoder's
    gate: Epilogue = Epilogue.SILU_MUL  # or GELU_MUL
    mixture: PackedMixture | None = None  # in the place of gate_up and down


@dataclass(frozen=True, slots=True)
class PackedOuter:
    """Packed weights outside the layers."""

    norm: Tensor  # [H] float32
    head: PackedLinear
    embed: Tensor | None  # [vocab, H]; None: the rows of `head`


class StepMemory:
    """Inputs and working memory of a step: made once, grown to the largest step so far, and reused.

        begin(...)  ->  token_ids[:T], sampled[:R] written by the caller, set_tables, set_tails, set_bounded
                    ->  CompiledLayers.step

    T tokens of S sequences, of which R rows are sampled.
    """

    token_ids: Int64s  # [T]
    sampled: Int64s  # [R]: rows whose head is computed
    residual: Tensor  # [T, H]
    partial: Tensor  # [T, H] float32: this rank's part of the sum for the residual, if it is not added immediately
    logits: Tensor  # [R, vocab] float32
    ids: Int64s  # [R]: the likeliest tokens less first_token, where the step picks them instead
    bests: Tensor  # [R or more, itemsize of BEST] uint8: `ids` with their logits

    def __init__(self, team: Team, shape: DecoderShape) -> None:
        self._team, self._shape = team, shape
        self._num_rows = self._num_seqs = self._num_logits = self._num_picked = self._width = self._num_tails = 0
        self._kept: dict[str, Tensor] = {}  # by field of `struct`
        self._masks: TokenMasks | None = None
        self._sparse = SparseMemory(shape.heads(shape.attentions[0]), shape.num_chosen, shape.block_size, shape.dtype)
        self.struct = StepStruct()
        self.taken = self.struct.taken  # hidden states that the next steps write; rows null: none
        self.takes = False  # its constants are set
        self._make("num_filled", (1,), torch.int64)
        self.address = ctypes.addressof(self.struct)

    def begin(
        self, num_new: Sequence[int] | Int32s, context_lens: Sequence[int] | Int32s, num_rows: int, width: int
    ) -> None:
        """num_new, context_lens: [S], as in PagedBatch; num_rows: T; width: blocks of the longest context."""
        num_seqs, step = len(num_new), self.struct
        self._reserve(num_rows, num_seqs, width)
        step.num_rows, step.num_seqs, step.expert_rows.num_rows = num_rows, num_seqs, num_rows
        step.sparse.num_seqs, step.num_kept = 0, -1
        self._num_new[:num_seqs] = num_new
        self._context_lens[:num_seqs] = context_lens

    def set_tables(self, tables: Int32s, rows: Sequence[int] | Int64s) -> None:
        """tables: [any, width], contiguous, valid until the step is over; rows: [S], of each sequence."""
        self._tables = tables
        self.struct.tables, self.struct.table_width = tables.ctypes.data, tables.shape[1]
        self._table_rows[: len(rows)] = rows

    def set_tails(self, tails: Sequence[int]) -> None:
        """tails: of each sequence in order the tail's blocks of the blocks that its new tokens are in; empty: the cache
        has no tail."""
        if len(tails) > self._num_tails:
            self._num_tails = _grown(len(tails))
            self._tails = self._make("tails", (self._num_tails,), torch.int32).numpy()
            self._make("filled", (self._num_tails, 2), torch.int64)  # each fills a block at most
        if tails:
            self._tails[: len(tails)] = tails

    def keep(self, num_sampled: int) -> None:
        """Say that the first rows of `sampled`, ascending, are all that is read of the last layer's output. The step
        may end with these rows alone: `residual` has no others then, and `sampled` counts from 0."""
        self.struct.num_kept = num_sampled

    def set_bounded(self, bounded: Sequence[int]) -> None:
        """bounded: [S], of the sequences that are sparse the leading tokens that the bounds cover, -1 of others; empty:
        none is."""
        num_sparse = sum(num >= 0 for num in bounded)
        self.struct.sparse.num_seqs = num_sparse
        if num_sparse:
            self._sparse.reserve(self._num_seqs, self._width)
            self._sparse.bounded[: len(bounded)] = bounded
            self.struct.sparse = self._sparse.struct
            self.struct.sparse.num_seqs = num_sparse

    def want(self, num_sampled: int, *, picks: bool, masks: TokenMasks | None = None) -> None:
        """Choose what the next head computes of the sampled rows: their likeliest tokens (with masks, of those that
        they allow), or logits."""
        self.struct.num_sampled, self.struct.picks = num_sampled, picks
        self._masks, self.struct.masks = masks, masks.address if masks is not None else None
        if picks and num_sampled > self._num_picked:
            self._num_picked, num_threads = _grown(num_sampled), self._team.num_threads
            self.ids = self._make("ids", (self._num_picked,), torch.int64).numpy()
            self.bests = self._make("bests", (num_threads * self._num_picked, BEST.itemsize), torch.uint8)
            self._make("few_logits", (num_threads, SCRATCH), torch.float32)
        if not picks and num_sampled > self._num_logits:
            self._num_logits = num_sampled
            self.logits = self._make("logits", (num_sampled, self._shape.vocab_size), torch.float32)

    def profile(self) -> Tensor:
        """Return a [len(PARTS)] int64 tensor that gains the nanoseconds of each of PARTS from now on."""
        return self._make("nanoseconds", (len(PARTS),), torch.int64)

    def _reserve(self, num_rows: int, num_seqs: int, width: int) -> None:
        if num_rows <= self._num_rows and num_seqs <= self._num_seqs and width <= self._width:
            return
        if num_rows > self._num_rows:
            self._num_rows = _grown(num_rows)
            self._make_rows(self._num_rows)
        if num_seqs > self._num_seqs or width > self._width:
            self._num_seqs, self._width = _grown(max(num_seqs, self._num_seqs)), _grown(max(width, self._width))
            self._make_seqs(self._num_seqs, self._width)
        limits = AttentionLimits(self._num_seqs, self._num_rows, self._width * self._shape.block_size)
        shape = self._shape
        self._scratches = [
            AttentionScratch.of(self._team, shape.dtype, shape.heads(kind), limits) for kind in shape.attentions
        ]
        self._addresses = (_P * len(self._scratches))(*(scratch.address for scratch in self._scratches))
        self.struct.limits, self.struct.scratches = limits, ctypes.addressof(self._addresses)

    def _make_rows(self, num_rows: int) -> None:
        shape, dtype = self._shape, self._shape.dtype
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.token_ids = self._make("token_ids", (num_rows,), torch.int64).numpy()
        self.sampled = self._make("sampled", (num_rows,), torch.int64).numpy()
        self._make("slots", (num_rows,), torch.int64)
        self._make("positions", (num_rows,), torch.int64)
        self.residual = self._make("residual", (num_rows, shape.hidden_size), dtype)
        self._make("qkv", (num_rows, q_size + 2 * kv_size), dtype)
        self._make_factor("normed", max(num_rows, _FEW_ROWS * self._team.num_threads), shape.hidden_size)
        self._make_factor("attended", num_rows, q_size)
        self._make_factor("inner", num_rows, shape.inner_size)
        if shape.is_split or shape.leaves_halves:
            self.partial = self._make("partial", (num_rows, shape.hidden_size), torch.float32)
        if shape.experts is not None:
            self._experts = ExpertMemory(self._team, shape.experts, num_rows)
            self.struct.expert_rows = self._experts.struct
            self._make("router_logits", (num_rows, shape.num_experts), torch.float32)

    def _make_factor(self, field: str, num_rows: int, size: int) -> None:
        """Rows that are multiplied by weights."""
        dtype = self._shape.dtype
        stride = row_stride(size, dtype)
        self._make(field, (num_rows, stride), dtype)
        setattr(self.struct, f"{field}_stride", stride)

    def _make_seqs(self, num_seqs: int, width: int) -> None:
        self._num_new = self._make("num_new", (num_seqs,), torch.int32).numpy()
        self._context_lens = self._make("context_lens", (num_seqs,), torch.int32).numpy()
        self._table_rows = self._make("table_rows", (num_seqs,), torch.int64).numpy()
        self._make("query_starts", (num_seqs + 1,), torch.int32)
        self._make("tail_starts", (num_seqs,), torch.int32)
        self._make("block_tables", (num_seqs, width), torch.int32)
        self.struct.block_table_width = width

    def _make(self, field: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = self._kept[field] = torch.zeros(size, dtype=dtype)
        setattr(self.struct, field, made.data_ptr())
        return made


def _grown(size: int) -> int:
    return max(_LEAST, 1 << (size - 1).bit_length())


class CompiledLayers:
    """The decoder of a rank, as the structures that kernels read; keeps what those point to. `cache_layers`: as
    attention.py packs them."""

    def __init__(
        self,
        team: Team,
        shape: DecoderShape,
        layers: Sequence[PackedLayer],
        outer: PackedOuter,
        cache_layers: Sequence[Tensor],
        expert_tokens: Tensor | None = None,
        bounds: Mapping[int, Tensor] = NO_BOUNDS,
        tails: Sequence[Tensor] = (),
    ) -> None:
        """expert_tokens: [layers, experts] int64 contiguous, gains how many tokens go to each; None: nobody counts.
        bounds: as sparse.py has them, of the layers whose attention is sparse; without, no step may say so. tails: of
        each layer, [num_tail_blocks, 2, K, 2, 16 D], packed; the cache is as kv/kivi.py has it then."""
        self._kept = (team, shape, layers, outer, cache_layers, expert_tokens, bounds, tails)
        assert all(shape.attentions[layers[i].attention].is_sparse for i in bounds)
        self._team, self.num_layers = team, len(layers)
        mixtures = [layer.mixture for layer in layers]
        assert all(
            of is None or (of.experts.sizes, of.num_experts) == (shape.experts, shape.num_experts) for of in mixtures
        )
        tokens: Sequence[Tensor | None] = [None] * len(layers) if expert_tokens is None else list(expert_tokens)
        self._mixtures = [None if of is None else _mixture(of, own) for of, own in zip(mixtures, tokens, strict=True)]
        self._layers = (LayerStruct * len(layers))(*map(_layer, layers, self._mixtures, cache_layers))
        heads = [shape.heads(kind) for kind in shape.attentions]
        ropes = (Rope.of(kind.rope, own) for kind, own in zip(shape.attentions, heads, strict=True))
        for i, of in bounds.items():
            self._layers[i].bounds = of.data_ptr()
        are_sparse = [kind.is_sparse for kind in shape.attentions]
        self._attentions = (Attention * len(heads))(*map(Attention, heads, ropes, are_sparse))
        self.struct = decoder = DecoderStruct()
        decoder.layers, decoder.attentions = ctypes.addressof(self._layers), ctypes.addressof(self._attentions)
        decoder.norm, decoder.head = outer.norm.data_ptr(), outer.head.of
        decoder.embed, decoder.first_token = address_of(outer.embed), shape.first_token
        decoder.num_layers, decoder.num_attentions, decoder.hidden_size = len(layers), len(heads), shape.hidden_size
        cache = cache_layers[0]
        decoder.block_stride, decoder.block_size = cache.stride(0) * cache.element_size(), shape.block_size
        decoder.eps, decoder.dtype = shape.eps, DTYPES[shape.dtype]
        decoder.embed_scale, decoder.logit_softcap = shape.embed_scale, shape.logit_softcap
        decoder.norms_whole_rows = any(x.q_norm is not None and x.q_norm.numel() != shape.head_dim for x in layers)
        decoder.is_split, decoder.kv_format = shape.is_split, KIVI_FORMAT if tails else Cache.of(cache).format
        for of, layer, tail in zip(self._layers, cache_layers, tails, strict=bool(tails)):
            Cache.of_kivi(layer, Cache.of(tail))
            assert tail.dtype == shape.dtype and shape.block_size == GROUP
            of.tail, decoder.tail_stride = tail.data_ptr(), tail.stride(0) * tail.element_size()
        self._run_step = team.library.kernel("decoder_step", _P, _P, _L, _L)
        self._run_half = team.library.kernel("decoder_half", _P, _P, _L, _I)
        self.address = ctypes.addressof(decoder)

    def step(self, memory: StepMemory, first: int, last: int) -> None:
        """layer.cpp's decoder_step."""
        self._run_step(self._team.address, self.address, memory.address, first, last)

    def half(self, memory: StepMemory, layer: int, half: int) -> None:
        """layer.cpp's decoder_half."""
        self._run_half(self._team.address, self.address, memory.address, layer, half)


def _layer(of: PackedLayer, mixture: Mixture | None, cache: Tensor) -> LayerStruct:
    around = of.input_norm, of.attention_out_norm, of.mlp_norm, of.mlp_out_norm
    vectors = (address_of(vector) for vector in (*around, of.q_norm, of.k_norm, of.sinks))
    products = (Linear() if product is None else product.of for product in (of.qkv, of.o, of.gate_up, of.down))
    return LayerStruct(
        *vectors, *products, cache.data_ptr(), None, of.attention, of.gate, mixture and ctypes.addressof(mixture)
    )


def _mixture(of: PackedMixture, expert_tokens: Tensor | None) -> Mixture:
    assert expert_tokens is None or (expert_tokens.shape == (of.num_experts,) and expert_tokens.dtype == torch.int64)
    routing = PackedRouting.of(of.routing, of.num_experts, of.choice_bias)
    return Mixture(of.router.of, routing, of.experts.of, address_of(expert_tokens))
