"""Delays of a busy machine. Python imports this file at the start of each process that has its folder in PYTHONPATH.

BUSY=<probability>:<seconds>:<seed>. A process is delayed, for `seconds` on average, where it reads the clock: with this
probability at the first readings of each second at a place in the code, and a hundredth of it at the others. So code
that does something once is delayed about as often as a loop. Each process draws by the seed and its own number.
"""

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import CodeType

FIRST_READINGS = 3


def delay_readings(probability: float, seconds: float, seed: int) -> None:
    """Have the functions of `time` that code here measures by delay their callers."""
    rng, sleep, now = random.Random(seed * 1_000_003 + os.getpid()), time.sleep, time.monotonic
    counts, second = Counter[tuple[CodeType, int]](), now()

    def delaying(read: Callable[[], float]) -> Callable[[], float]:
        def read_late() -> float:
            nonlocal second
            if now() - second > 1.0:
                second = now()
                counts.clear()
            caller = sys._getframe(1)
            place = caller.f_code, caller.f_lineno
            counts[place] += 1
            if rng.random() < probability / (1 if counts[place] <= FIRST_READINGS else 100):
                sleep(rng.random() * 2 * seconds)
            return read()

        return read_late

    for name in ("monotonic", "perf_counter", "time"):
        setattr(time, name, delaying(getattr(time, name)))


if given := os.environ.get("BUSY"):
    texts = given.split(":")
    delay_readings(float(texts[0]), float(texts[1]), int(texts[2]))
