"""Commands run in the tests' own process; `serve` leaves signals ignored, as at a process's end."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def signals_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
