"""Keeps the shortest time per output token that the sequences which decode were promised."""

from .sequence import Sequence


class TightestTpot:
    """Multiset of times. O(1), but to remove the last of the shortest: O(different times)."""

    def __init__(self, default_s: float) -> None:
        """`default_s`: of a sequence whose request names none."""
        self.least_s = default_s  # that value without sequences, too
        self._default_s = default_s
        self._counts: dict[float, int] = {}

    def add(self, sequence: Sequence) -> None:
        tpot_s = self._of(sequence)
        self.least_s = min(self.least_s, tpot_s) if self._counts else tpot_s
        self._counts[tpot_s] = self._counts.get(tpot_s, 0) + 1

    def remove(self, sequence: Sequence) -> None:
        tpot_s = self._of(sequence)
        self._counts[tpot_s] -= 1
        if not self._counts[tpot_s]:
            del self._counts[tpot_s]
            if tpot_s == self.least_s:
                self.least_s = min(self._counts, default=self._default_s)

    def _of(self, sequence: Sequence) -> float:
        tpot_s = sequence.request.level.tpot_s
        return self._default_s if tpot_s is None else tpot_s
