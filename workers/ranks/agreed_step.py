"""Size of a step on which workers that share experts agree before it, so that their devices launch one shape. Pure.

each: the size of its batch ──> all ──> the most rows, and whether anybody has prompts
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSize:
    """Size of a worker's batch, or of the step of all. A number in a message: rows * 2 + has_prompts."""

    num_rows: int = 0  # tokens; 0: there is no batch
    has_prompts: bool = False  # some tokens are not of decodes or their drafts: no decode graph computes them

    @classmethod
    def of_number(cls, number: int) -> "StepSize":
        return cls(number >> 1, bool(number & 1))

    @property
    def number(self) -> int:
        return self.num_rows << 1 | self.has_prompts


def agreed(numbers: Iterable[int]) -> StepSize:
    """Return the size of the step: each worker has so many rows in it, some of them idle. numbers: of all workers'
    batches."""
    sizes = [StepSize.of_number(number) for number in numbers]
    return StepSize(max(size.num_rows for size in sizes), any(size.has_prompts for size in sizes))
