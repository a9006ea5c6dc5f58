"""Passes of a draft head in one foreign call: the structures of head.h, and the buffers of passes."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .experts import row_stride
from .layer import CompiledLayers, DecoderShape, StepMemory
from .library import Team
from .linear import Linear, PackedLinear, address_of

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_LEAST = 64  # rows: buffers are not smaller


class HeadStruct(ctypes.Structure):
    """head.h's struct Head."""

    _fields_ = (
        *((name, _P) for name in ("layers", "embed_norm", "hidden_norm")),
        *((name, Linear) for name in ("fc", "joined")),
        ("to_target", _P),
        *((name, _I) for name in ("norms_residual", "norms_output")),
    )


class PassesStruct(ctypes.Structure):
    """head.h's struct Passes."""

    _fields_ = (
        *((name, _P) for name in ("step", "token_ids", "num_new", "context_lens")),
        ("num_passes", _L),
        *((name, _P) for name in ("num_active", "aux", "hidden", "wide")),
        ("wide_stride", _L),
        *((name, _P) for name in ("tallies", "ids", "chances")),
    )


class TallyStruct(ctypes.Structure):
    """head.h's struct Tally."""

    _fields_ = (("logit", _F), ("mass", _F), ("id", _L))


@dataclass(frozen=True, slots=True)
class PackedHead:
    """Weights of a head beside its layers. H: hidden size; A: numbers that its target leaves of a token."""

    embed_norm: Tensor  # [H] float32
    hidden_norm: Tensor  # [H] float32
    fc: PackedLinear | None  # [H, A]; None: what the target leaves is a hidden state
    joined: PackedLinear | None  # [H, 2H]; None: the first layer reads an embedding and a hidden state side by side
    to_target: Tensor | None  # [draft vocab] int64: the target's ids; None: the vocabularies are the same
    norms_residual: bool = False  # the residual begins as the normed hidden state, where nothing is joined
    norms_output: bool = False  # fed back is the hidden state after the final norm


class CompiledPasses:
    """Passes of a head over the paged cache of its layers.

        memory.begin, set_tables, token_ids written   ->   store, or logits, or greedy, of these entries

    T entries of S sequences. A further pass is of one entry of some of the first sequences.
    """

    def __init__(self, team: Team, shape: DecoderShape, head: PackedHead, layers: CompiledLayers) -> None:
        """shape, layers: of the head's layers; vocabulary: the draft's, norm: the head's own."""
        self._team, self._shape, self._kept = team, shape, (head, layers)
        self.memory = StepMemory(team, shape)
        fc, joined = (Linear() if of is None else of.of for of in (head.fc, head.joined))
        norms = head.embed_norm.data_ptr(), head.hidden_norm.data_ptr()
        flags = head.norms_residual, head.norms_output
        self._head = HeadStruct(layers.address, *norms, fc, joined, address_of(head.to_target), *flags)
        self._passes = PassesStruct(self.memory.address)
        self._addresses = ctypes.addressof(self._head), ctypes.addressof(self._passes)
        self._run = team.library.kernel("head_passes", _P, _P)
        self._aux_size = shape.hidden_size if head.fc is None else head.fc.of.k
        self._num_rows = self._num_seqs = 0

    def store(self, aux: Tensor) -> None:
        """Store the KV of entries. aux: [T, A] of the head's dtype, contiguous: what the target left."""
        self._call(aux, 0)

    def logits(self, aux: Tensor | None, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute a pass. aux: as `store` has it; None: `hidden` [T, H] is what the pass before returned. Returns what
        is fed back, [S, H], and logits [S, draft vocab] float32, of each sequence's last entry; both are valid until
        the next pass."""
        num_seqs = self.memory.struct.num_seqs
        self.memory.want(num_seqs, picks=False)
        self._reserve()
        if hidden is not None:
            self._hidden[: len(hidden)] = hidden
        self._passes.ids = None
        self._call(aux, 1)
        return self._hidden[:num_seqs], self.memory.logits[:num_seqs]

    def greedy(self, aux: Tensor, num_active: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Draft the likeliest tokens. aux: as `store` has it. num_active: [passes], the sequences of each pass, all and
        then never more. Returns the target's ids of the tokens, and their probabilities, [passes, S]; what is beyond
        a pass's sequences means nothing."""
        num_seqs, num_passes = self.memory.struct.num_seqs, len(num_active)
        assert num_active[0] == num_seqs
        self.memory.want(num_seqs, picks=True)
        active = np.array(num_active, dtype=np.int64)
        ids = np.zeros((num_passes, num_seqs), dtype=np.int64)
        chances = np.zeros((num_passes, num_seqs), dtype=np.float32)
        passes = self._passes
        passes.num_active, passes.ids, passes.chances = (of.ctypes.data for of in (active, ids, chances))
        self._call(aux, num_passes)
        return ids, chances

    def _call(self, aux: Tensor | None, num_passes: int) -> None:
        step, passes = self.memory.struct, self._passes
        assert aux is None or (
            aux.shape == (step.num_rows, self._aux_size) and aux.dtype == self._shape.dtype and aux.is_contiguous()
        )
        self._reserve()
        passes.token_ids, passes.num_new, passes.context_lens = step.token_ids, step.num_new, step.context_lens
        passes.aux, passes.num_passes = address_of(aux), num_passes
        self._run(self._team.address, *self._addresses)

    def _reserve(self) -> None:
        num_rows, num_seqs, passes = self.memory.struct.num_rows, self.memory.struct.num_seqs, self._passes
        if num_rows > self._num_rows:
            size, dtype = self._shape.hidden_size, self._shape.dtype
            self._num_rows = max(_LEAST, 1 << (num_rows - 1).bit_length())
            passes.wide_stride = row_stride(2 * size, dtype)
            self._hidden = torch.zeros(self._num_rows, size, dtype=dtype)
            self._wide = torch.zeros(self._num_rows, passes.wide_stride, dtype=dtype)
            passes.hidden, passes.wide = self._hidden.data_ptr(), self._wide.data_ptr()
        if num_seqs > self._num_seqs:
            self._num_seqs = max(_LEAST, 1 << (num_seqs - 1).bit_length())
            num_bytes = self._team.num_threads * self._num_seqs * ctypes.sizeof(TallyStruct)
            self._tallies = torch.zeros(num_bytes, dtype=torch.uint8)
            passes.tallies = self._tallies.data_ptr()
