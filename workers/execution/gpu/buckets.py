"""Sizes of steps, and those that graphs are captured for. Pure: no torch.

A batch gets the smallest bucket that holds it; what is left of it is padded. Steps of a few percent cost little where
weights dominate; sizes are multiples of 8, as matrix units like them.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.drafting import max_drafted

_ROW_STEPS = ((64, 8), (128, 16), (256, 32), (1 << 30, 64))  # up to this many rows, one bucket per this many rows
_SMALL = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of the largest step."""

    max_sequences: int
    max_draft_tokens: int = 0  # of a sequence; 0: nothing is drafted
    max_batch_tokens: int = 512  # with those of prompts

    @property
    def max_rows(self) -> int:
        """Rows that are sampled, or that a decode graph computes: each sequence's own, and those of drafted tokens."""
        return self.max_sequences + (max_drafted(self.max_sequences) if self.max_draft_tokens else 0)


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Ascending; the last is `max_rows`."""
    assert max_rows >= 1
    buckets = [size for size in _SMALL if size < max_rows]
    size = _SMALL[-1]
    while True:
        size += next(step for limit, step in _ROW_STEPS if size < limit)
        if size >= max_rows:
            return (*buckets, max_rows)
        buckets.append(size)


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """Ascending, none for 0: powers of two from 8 on, and halfway between them from 64 on."""
    buckets: list[int] = []
    size = 8
    while size <= max_tokens:
        buckets.append(size)
        if size >= 64 and size * 3 // 2 <= max_tokens:
            buckets.append(size * 3 // 2)
        size *= 2
    return tuple(buckets)


def bucket_for(buckets: Sequence[int], num: int) -> int | None:
    """The smallest that holds `num`, if one does."""
    index = bisect_left(buckets, num)
    return buckets[index] if index < len(buckets) else None
