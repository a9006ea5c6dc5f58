"""Two halves of a step's rows: while rows of one are under way between workers, the other is computed.

    lane      attention A, attention B, experts A,  experts B,  rest and attention A, ...
    beside                 gather A,    gather B,   scatter A,  scatter B, ...

A half is work that is cut at its exchanges (models/layers/turns.py). Each of its parts waits for the exchange before
it, and each exchange for all that was launched on the lane before it. So

- all workers exchange in one order, A before B, on one lane: whoever has no rows in a half takes part in its exchanges
- memory of the lane that an exchange reads is held by the half until its next part, before which the lane waits
- memory that an exchange has made is freed by a part of the half, which every later exchange waits for

The first half has the rows that come first, for a sequence may be cut: each layer of A stores its KV before B attends.
"""

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from ....kernels.common.untried import is_wanted
from ...common.errors import ConfigError
from ...device.device import Event, Lane
from ...models.families.spec import ModelSpec, MoeSpec
from ...models.layers.layer import Layer
from ...models.layers.row_exchange import RowExchange
from ...models.layers.turns import Exchange, InTurns

OVERLAPPED = "overlapped-halves"  # a name of kernels/common/untried.py
# Floating-point operations of a worker's experts in a layer, from which a step is computed in halves: 2.2 ms at 500
# TFLOP/s. So long take the launches of a layer, twice (1.1 ms, whatever the prompt has: DeepSeek-V2-Lite on an H200).
LEAST_OPERATIONS = 1.1e12


def are_wanted() -> bool:
    """Return whether workers on devices compute large steps in halves. Raises ConfigError."""
    try:
        return is_wanted(OVERLAPPED)
    except ValueError as e:
        raise ConfigError(str(e)) from e


def least_rows(spec: ModelSpec) -> int:
    """Return how many rows each worker has in the smallest step that is computed in halves. As many rows of all go to
    the experts of each."""
    mixtures = [of for layer in spec.layers if isinstance(of := layer.feed_forward, MoeSpec)]
    widths = [of.routing.top_k * of.expert.intermediate_size for of in mixtures]
    return math.ceil(LEAST_OPERATIONS / (6 * spec.hidden_size * min(widths)))  # gate, up and down, each added up


def rows_of_half(num_rows: int) -> int:
    """Rows of each half of a step of `num_rows` on each worker. There is one to spare in each, for `first_rows`."""
    return -(-num_rows // 2) + 1


def first_rows(num_new: Sequence[int], num_half: int) -> int:
    """Return how many of a worker's rows are in the first half, so that neither has more than `num_half`: as near to
    one half as can be, where no sequence of several new tokens is left with one of them, which other kernels would
    compute. num_new: of its sequences."""
    ends, total = np.cumsum(num_new, dtype=np.int64), sum(num_new)
    starts, middle = ends - np.array(num_new, dtype=np.int64), total // 2
    near = range(max(total - num_half, middle - 2, 0), min(num_half, middle + 2, total) + 1)
    for num in sorted(near, key=lambda num: abs(num - middle)):
        cut = np.flatnonzero((starts < num) & (num < ends))  # one sequence, or none
        if not len(cut) or (num - starts[cut[0]] > 1 and ends[cut[0]] - num > 1):
            return num
    raise AssertionError("of three cuts side by side one leaves no token alone")


@dataclass(frozen=True, slots=True)
class Halves:
    """Halves of a step, the same on all workers."""

    exchange: RowExchange
    beside: Lane  # of the exchanges
    num_rows: int  # of each half

    def run(self, lane: Lane, works: Sequence[InTurns[None]], layers: Iterable[Layer]) -> None:
        """Launch both halves' work, which has the experts of `layers`."""
        lane.run(partial(self.exchange.agree, self.num_rows, len(works)))
        num_pieces = self.exchange.num_pieces(self.num_rows, len(works))
        halves = [_Half(work) for work in works]
        given: list[Event | None] = [None] * len(works)
        for _ in range(2 * num_pieces * sum(layer.experts is not None for layer in layers)):
            for i, half in enumerate(halves):
                if (event := given[i]) is not None:
                    lane.after(event)
                lane.run(half.advance)
                self.beside.after(lane.record())
                self.beside.run(half.exchange)
                given[i] = self.beside.record()
        for half, event in zip(halves, given, strict=True):
            if event is not None:
                lane.after(event)
            lane.run(half.finish)


class _Half:
    """One half under way. Its methods are device work."""

    def __init__(self, work: InTurns[None]) -> None:
        self._work: Generator[Exchange, Any, None] = work
        self._exchange: Exchange | None = None  # due, or under way
        self._given: Tensor | None = None

    def advance(self) -> None:
        """Go on to the next exchange, or to the end."""
        given, self._given = self._given, None
        try:
            self._exchange = self._work.send(given)
        except StopIteration:
            self._exchange = None

    def exchange(self) -> None:
        assert self._exchange is not None, "a half exchanges less often than was said"
        self._given = self._exchange()

    def finish(self) -> None:
        """Go on to the end."""
        self.advance()
        assert self._exchange is None, "a half exchanges more often than was said"
