"""Quota that all calls of a router share: bytes of bodies, log-probabilities of answers; or those of an API key."""

from types import TracebackType
from typing import Self

from ...workers.common.errors import Overloaded


class Quota:
    def __init__(self, most: int, refusal: str) -> None:
        """`refusal`: what a call is told that would exceed it."""
        self.most = most
        self._refusal = refusal
        self.num_held = 0

    def share(self) -> "QuotaShare":
        """Return a call's share, a context manager."""
        return QuotaShare(self)

    def take(self, num: int) -> None:
        """Raises Overloaded."""
        self.check(self.num_held + num <= self.most)
        self.num_held += num

    def check(self, has_room: bool) -> None:
        """Raises Overloaded where there is no room."""
        if not has_room:
            raise Overloaded(f"{self._refusal} (at most {self.most} at a time)")


class QuotaShare:
    """Gives back at its end what it took."""

    def __init__(self, budget: Quota) -> None:
        self._budget = budget
        self.num_taken = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()

    def give_back(self) -> None:
        self._budget.num_held -= self.num_taken
        self.num_taken = 0

    def take(self, num: int) -> None:
        """Raises Overloaded."""
        self._budget.take(num)
        self.num_taken += num

    def take_part(self, num: int, part: float) -> None:
        """Take where the share has then at most `part` times what is free: a few large shares keep no small ones out.
        Raises Overloaded. Source: the dynamic thresholds of Choudhury and Hahne, 1998."""
        self._budget.check(self.num_taken + num <= part * (self._budget.most - self._budget.num_held - num))
        self.take(num)
