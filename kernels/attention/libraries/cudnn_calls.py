"""Attention of one sequence by cuDNN, which torch for CUDA brings along (`aten::_scaled_dot_product_cudnn_attention`).

    [front, new, padding] x the same tokens, causal       one square call
    [new, padding] x a piece of what stands before        a call for each piece, all of which the new tokens see

The front is what pieces leave over, less than `unit` tokens. Results are merged by the logarithms of their sums.

What ATen does (aten/src/ATen/native/cudnn/MHA.cpp, as it was before torch 2.13 and after it) decides this form:

- It builds a plan for each new size or stride, in some 40 ms on the host (pytorch 191576), and keeps it for the thread
  that called. So lengths are padded to some that are known at load, and all calls are made by a thread of the library's
  own: a worker loads on another thread than it computes on.
- A plan that cannot be built leaves an empty place, which the same call would follow the second time. Nothing here
  calls again what has failed.
- Calls with cum_seq_q keep no plan (191576 mends that), so there is a dense call for each sequence.
- The causal mask begins at the first key: padding at the end of a square is seen by padding alone. Of a call without a
  mask each key is seen, so no key of a piece is padding.
- Keys and values may have fewer heads than queries. Logarithms are natural, of scores that are scaled.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ...common.tuning import chip_of
from .merge_results import merge_results

LEAST_VERSION = 91501  # earlier ones are wrong at lengths that are no multiples of 128 (pytorch 169849)
DTYPES = torch.bfloat16, torch.float16
ALIGNMENT = 16  # bytes: cuDNN faults at other addresses

# Tokens first to first + count of a context -> its keys [size, K, D] and values [size, K, V], finite numbers behind
# them. Their strides depend on the size alone.
Fetch = Callable[[int, int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class CudnnConfig:
    """Lengths, in tokens. Sides of squares are a sixteenth of a power of two apart (not less than `step`), rows of
    pieces a quarter. Where lengths are spread evenly, padding takes 4 % of a square's time from 2,048 tokens on, 9 %
    from 1,024 on, and 9 % of a piece's."""

    least_new: int = 512  # new tokens of a sequence that is computed here
    least_pairs: int = 2_000_000  # of a query and a key that it sees: of fewer the copies take more than is gained
    unit: int = 1024  # of pieces, which are this many tokens times a power of two
    most_piece: int = 16384
    step: int = 128  # lengths are multiples of it


@dataclass(frozen=True, slots=True)
class SequenceCalls:
    """Calls for one sequence."""

    front: int  # tokens before the new ones that the square has
    side: int  # of the square, with padding
    rows: int  # queries of a piece, with padding
    pieces: tuple[int, ...]  # tokens of each


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths of all calls for sequences of up to `most_new` new tokens and `most_context` in all."""

    config: CudnnConfig
    most_new: int
    most_context: int
    sides: tuple[int, ...]
    rows: tuple[int, ...]
    pieces: tuple[int, ...]  # the longest first

    @staticmethod
    def of(max_tokens: int, max_context: int, config: CudnnConfig | None = None) -> Sizes:
        config, most_new = config or CudnnConfig(), min(max_tokens, max_context)
        full = _rounded(most_new, config.step)
        # A square has a front where a chunk has something before it.
        last = max(full, _rounded(min(most_new + config.unit - 1, max_context), config.step))
        sides = {*_spaced(config, 16, last), full, last}
        rows = {*_spaced(config, 4, full), full}
        pieces, piece = list[int](), config.unit
        while piece <= min(config.most_piece, max_context - config.least_new):
            pieces.insert(0, piece)
            piece *= 2
        return Sizes(config, most_new, max_context, tuple(sorted(sides)), tuple(sorted(rows)), tuple(pieces))

    def cut(self, num_new: int, context_len: int) -> SequenceCalls | None:
        """None: our kernel computes the sequence. It depends on nothing else in the step."""
        history = context_len - num_new
        pairs = num_new * history + num_new * (num_new + 1) // 2
        if num_new < self.config.least_new or pairs < self.config.least_pairs:
            return None
        if num_new > self.most_new or context_len > self.most_context:
            return None
        front, pieces = history % self.config.unit, list[int]()
        left = history - front
        for piece in self.pieces:
            pieces += [piece] * (left // piece)
            left %= piece
        side = self.sides[bisect_left(self.sides, front + num_new)]
        return SequenceCalls(front, side, self.rows[bisect_left(self.rows, num_new)], tuple(pieces))

    def runs(
        self, num_new: Sequence[int], context_lens: Sequence[int], first: int = 0
    ) -> Iterator[tuple[range, SequenceCalls | None]]:
        """Sequences from `first` on, side by side: one that cuDNN computes, or as many as our kernel does."""
        cuts = [(s, self.cut(num_new[s], context_lens[s])) for s in range(first, len(num_new))]
        for _, together in groupby(cuts, lambda each: -1 if each[1] is None else each[0]):
            (start, cut), *others = together
            yield range(start, start + 1 + len(others)), cut

    @property
    def is_of_use(self) -> bool:
        """Return whether any whole prompt is long enough, one that is timed at load among them."""
        return self.cut(self.most_new - 1, self.most_new - 1) is not None


def _rounded(length: int, step: int) -> int:
    return -(-length // step) * step


def _spaced(config: CudnnConfig, per_octave: int, end: int) -> list[int]:
    """Lengths from the least new tokens on, below `end`."""
    lengths, length = list[int](), _rounded(config.least_new, config.step)
    while length < end:
        lengths.append(length)
        length += max(_rounded((1 << (length.bit_length() - 1)) // per_octave, config.step), config.step)
    return lengths


class CudnnCalls:
    """cuDNN's attention, with its thread."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._op: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
        self._thread = ThreadPoolExecutor(1, "diptych-cudnn")

    def run(self, device: torch.device, work: Callable[[], object]) -> None:
        """Do work on the library's thread, for the caller's stream, and wait until it is launched."""
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._thread.submit(partial(_launched_on, stream, work)).result()

    def attend(self, q: Tensor, cut: SequenceCalls, fetch: Fetch, scale: float) -> Tensor:
        """q: [T, N, D]. Returns [T, N, V]. To be called on the library's thread."""
        num_new, first = len(q), sum(cut.pieces)
        new = slice(cut.front, cut.front + num_new)
        square = fetch(first, new.stop, cut.side)
        whole, logs = self._call(_padded(q, cut.front, cut.side), *square, scale, is_causal=True)
        if not cut.pieces:
            return whole[new]
        out, logs, rows, place = whole[new], logs[:, new].contiguous(), _padded(q, 0, cut.rows), 0
        for piece in cut.pieces:
            part, part_logs = self._call(rows, *fetch(place, piece, piece), scale, is_causal=False)
            place += piece
            dtype = torch.float32 if place < first else q.dtype  # until all are merged, and in the end
            out, logs = merge_results(out, logs, part[:num_new], part_logs[:, :num_new], dtype)
        return out

    def build(self, q: Tensor, fetch: Fetch, scale: float) -> None:
        """Build the plans of all sizes and the kernels of all merges, and take the memory of the largest sequence once.
        q: [1, N, D]. To be called on the library's thread."""
        sizes = self.sizes

        def rows(num: int) -> Tensor:
            return q.new_zeros(num, *q.shape[1:])

        for side in sizes.sides:
            self._call(rows(side), *fetch(0, side, side), scale, is_causal=True)
        for num in sizes.rows:
            for piece in sizes.pieces:
                self._call(rows(num), *fetch(0, piece, piece), scale, is_causal=False)
        side, num, unit = sizes.sides[0], sizes.rows[0], sizes.config.unit
        for num_pieces in (1, 2, 3):  # the first merge has other dtypes than the last
            if num_pieces * unit + num <= sizes.most_context:
                self.attend(rows(num), SequenceCalls(0, side, num, (unit,) * num_pieces), fetch, scale)
        if (largest := sizes.cut(sizes.most_new, sizes.most_context)) is not None:
            self.attend(rows(sizes.most_new), largest, fetch, scale)

    def _call(self, q: Tensor, keys: Tensor, values: Tensor, scale: float, *, is_causal: bool) -> tuple[Tensor, Tensor]:
        """q: [rows, N, D]; keys: [C, K, D]; values: [C, K, V]. Returns [rows, N, V] and logarithms, [N, rows] float32,
        which are always computed: without them plans would be others."""
        in_heads = (of.transpose(0, 1)[None] for of in (q, keys, values))
        out, logs, *_ = self._op(*in_heads, None, True, 0.0, is_causal, False, scale=scale)
        return out[0].transpose(0, 1), logs.reshape(q.shape[1], len(q))


@torch.inference_mode()
def _launched_on(stream: torch.cuda.Stream | None, work: Callable[[], object]) -> None:
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        work()


def _padded(q: Tensor, front: int, size: int) -> Tensor:
    """Rows with zeros around them, [size, N, D] contiguous. What is so already is not copied."""
    if len(q) == size and q.stride() == (q[0].numel(), q.shape[2], 1) and q.data_ptr() % ALIGNMENT == 0:
        return q
    rows = q.new_zeros(size, *q.shape[1:])
    rows[front : front + len(q)] = q
    return rows


def is_usable(device: torch.device) -> bool:
    """Return whether this device and the cuDNN that is loaded are those for which ATen prefers it."""
    is_known = not {"sm_90", "sm_100"}.isdisjoint(chip_of(device).kinds)
    return is_known and (torch.backends.cudnn.version() or 0) >= LEAST_VERSION
