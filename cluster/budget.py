"""What all calls of a router may hold together of something: bytes of bodies, log-probabilities of answers."""

from collections.abc import Generator
from contextlib import contextmanager

from ..workers.errors import Overloaded


class Budget:
    def __init__(self, most: int, refusal: str) -> None:
        """`refusal`: what a call is told that would exceed it."""
        self._most = most
        self._refusal = refusal
        self.num_held = 0

    @contextmanager
    def share(self) -> Generator["Share"]:
        """Open one call's share; give back at the end what it took."""
        share = Share(self)
        try:
            yield share
        finally:
            self.num_held -= share.num_taken

    def take(self, num: int) -> None:
        """Raises Overloaded."""
        if self.num_held + num > self._most:
            raise Overloaded(f"{self._refusal} (at most {self._most} at a time)")
        self.num_held += num


class Share:
    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.num_taken = 0

    def take(self, num: int) -> None:
        """Raises Overloaded."""
        self._budget.take(num)
        self.num_taken += num
