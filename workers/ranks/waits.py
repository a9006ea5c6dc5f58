"""Waits for other ranks or workers that are under way: since when the oldest is, for who ends one that takes too long.

Several threads may wait at once, and a wait may begin in the midst of another.
"""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager


class Waits:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[object, float] = {}  # of each that is under way, the oldest first

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Count the code within as a wait."""
        wait = object()
        with self._lock:
            self._since[wait] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._since[wait]

    def longest_s(self) -> float:
        """Return for how long the oldest has been under way; 0 where there is none."""
        now = time.monotonic()
        with self._lock:
            return now - next(iter(self._since.values()), now)
