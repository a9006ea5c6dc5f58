"""Progress of a measurement where output is no terminal."""

import asyncio
import io
import re

import numpy as np
from rich.console import Console

from diptych.cluster.bench.measure import Screen, Tally, connected, measure
from diptych.cluster.bench.run import Pace
from diptych.cluster.bench.settings import Target, parse_url
from diptych.cluster.bench.text import TokenText
from diptych.cluster.bench.types import Reply, RequestFailure, Session, Turn

from ...support.front import Echo, Served, served


class OpensTheGate(io.StringIO):
    """Text that unblocks the server when something was written."""

    door: Served

    def write(self, text: str) -> int:
        self.door.open_gate()
        return super().write(text)


def test_lines_come_while_an_answer_does_not() -> None:
    source = Echo()
    source.gate.clear()
    err, out = OpensTheGate(), io.StringIO()

    async def run(door: Served) -> list[Reply]:
        target = Target(parse_url(door.url), "completions", None, None, None, 120, 60.0, {})
        session = Session((Turn(TokenText(120).make(8, np.random.default_rng(0)), 8, 4),))
        async with connected(target) as connection:
            screen = Screen(Console(file=out), Console(file=err), line_s=0.01)
            return list((await measure(connection, [session], Pace(None, 1), {}, screen)).replies)

    with served(source) as door:
        err.door = door
        (reply,) = asyncio.run(run(door))
    assert reply.failure is None and reply.num_output == 4
    assert re.match(r"0 s: 0 of 1 requests, 0 tokens\n", err.getvalue())
    assert out.getvalue() == ""


def test_a_line_tells_counts() -> None:
    tally = Tally(12)
    tally.add(Reply(0.0, num_output=7))
    assert tally.line(4.6) == "5 s: 1 of 12 requests, 7 tokens"
    tally.add(Reply(0.0, failure=RequestFailure("HTTP 500", "it broke")))
    assert tally.line(9.8) == "10 s: 2 of 12 requests, 1 failed, 7 tokens"
