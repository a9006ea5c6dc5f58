"""Runs a computation on a thread with a large stack: what recurses as deeply as its input would overflow others."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def on_stack(num_bytes: int, compute: Callable[[], T]) -> T:
    """Return, or raise, what `compute` does. Other threads that start at the same time may get such a stack too: it is
    memory only as far as it is used."""
    with ThreadPoolExecutor(1, "diptych-large-stack") as executor:
        before = threading.stack_size(num_bytes)
        try:
            found = executor.submit(compute)
        finally:
            threading.stack_size(before)
        return found.result()
