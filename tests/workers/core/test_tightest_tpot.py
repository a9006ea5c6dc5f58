"""The multiset of promised times against a list."""

import random

from diptych.workers.common.request import RequestLevel
from diptych.workers.core.sequence import Sequence
from diptych.workers.core.tightest_tpot import TightestTpot

from ...support.sequences import make_sequence

DEFAULT_S = 0.04


def test_the_shortest_time_of_those_that_are_there() -> None:
    choice = random.Random(5)
    tightest = TightestTpot(DEFAULT_S)
    present: list[Sequence] = []
    for _ in range(2000):
        if present and choice.random() < 0.5:
            tightest.remove(present.pop(choice.randrange(len(present))))
        else:
            present.append(make_sequence([1], level=RequestLevel(tpot_s=choice.choice([None, 0.01, 0.04, 0.2, 1.0]))))
            tightest.add(present[-1])
        times = [s.request.level.tpot_s or DEFAULT_S for s in present]
        assert tightest.least_s == min(times, default=DEFAULT_S)
