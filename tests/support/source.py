"""Source text as a syntax tree."""

import ast
import gc
from collections.abc import Generator
from contextlib import contextmanager

from diptych.workers.common.garbage import collector_paused


def tree_of(source: str) -> ast.Module:
    """Parse Python. What an earlier test left could be collected meanwhile otherwise, and log a traceback."""
    with collector_paused():
        return ast.parse(source)


@contextmanager
def collections_that_parse() -> Generator[None]:
    """Collect garbage all the time, and parse Python in each collection, as a finaliser does that logs a traceback."""
    thresholds = gc.get_threshold()

    def parse(phase: str, info: dict[str, int]) -> None:
        ast.parse("f(1)")

    gc.callbacks.append(parse)
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(parse)
