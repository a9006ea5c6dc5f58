"""Deadlines of a worker's sequences, the next one first."""

import heapq
import math
from collections.abc import Mapping

from ..common.errors import DeadlineExceeded
from ..core.sequence import Sequence


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []  # with keys of sequences that may have left since then

    def add(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.deadline, sequence.key))

    @property
    def next(self) -> float:
        """The time by which somebody must look; infinite: there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def expired(self, now: float, here: Mapping[str, Sequence]) -> list[tuple[Sequence, DeadlineExceeded]]:
        """Return the sequences whose time is over, once each. `here`: by key, those that are on this worker."""
        found: list[tuple[Sequence, DeadlineExceeded]] = []
        while self._heap and self._heap[0][0] <= now:
            _, key = heapq.heappop(self._heap)
            if (sequence := here.get(key)) is not None:
                why = (
                    f"the request was not finished within its {sequence.request.timeout_s:.3g} s "
                    f"({sequence.num_output} tokens made): allow more time or ask for fewer tokens"
                )
                found.append((sequence, DeadlineExceeded(why)))
        return found
