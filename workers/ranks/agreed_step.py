"""Size of a step on which workers that share experts agree before it, so that their devices launch one shape. Pure.

each: the size of its batch, or of its draft ──> all ──> the most rows, and whether anybody has prompts, or drafts

A draft whose passes are layers of the model needs the others' experts. Where somebody has one, the step is its passes:
all compute them, those without one for no rows of their own, and batches wait for the step after it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

_PROMPTS, _PASSES = 1, 2  # in the lowest bits of a number
_KIND_BITS, _ROW_BITS = 2, 20


@dataclass(frozen=True, slots=True)
class StepSize:
    """Size of a worker's batch, or of the step of all."""

    num_rows: int = 0  # tokens; 0: there is no batch
    has_prompts: bool = False  # some tokens are not of decodes or their drafts: no decode graph computes them

    @property
    def number(self) -> int:
        """Number of the size in a message; 0: there is no batch."""
        return self.num_rows << _KIND_BITS | (_PROMPTS if self.has_prompts else 0)


@dataclass(frozen=True, slots=True)
class PassesSize:
    """Size of a worker's draft, or of all their drafts together."""

    num_rows: int  # of the first pass
    num_sequences: int  # rows of each further one
    num_passes: int

    @property
    def number(self) -> int:
        """Number of the size in a message."""
        sizes = (self.num_passes << _ROW_BITS | self.num_sequences) << _ROW_BITS | self.num_rows
        return sizes << _KIND_BITS | _PASSES


def size_of(number: int) -> StepSize | PassesSize:
    """Read the number of a size."""
    kind, sizes = number & (1 << _KIND_BITS) - 1, number >> _KIND_BITS
    if kind != _PASSES:
        return StepSize(sizes, kind == _PROMPTS)
    each = (1 << _ROW_BITS) - 1
    return PassesSize(sizes & each, sizes >> _ROW_BITS & each, sizes >> 2 * _ROW_BITS)


def agreed(numbers: Iterable[int]) -> StepSize | PassesSize:
    """Return the size of the step: each worker has so many rows in it, some of them idle. numbers: of all workers'
    batches or drafts."""
    sizes = [size_of(number) for number in numbers]
    if drafts := [size for size in sizes if isinstance(size, PassesSize)]:
        return PassesSize(
            max(size.num_rows for size in drafts),
            max(size.num_sequences for size in drafts),
            max(size.num_passes for size in drafts),
        )
    steps = [size for size in sizes if isinstance(size, StepSize)]
    return StepSize(max(size.num_rows for size in steps), any(size.has_prompts for size in steps))
