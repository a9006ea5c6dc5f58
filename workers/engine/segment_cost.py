"""Chooses in how many groups of layers a step's KV is announced, from measured costs. No torch.

A step computes for T seconds KV that takes a link of bandwidth BW L = bytes / BW seconds to read. In g groups of
layers, each group's read begins while the next is being computed, so that after the step's last layer there remains

    L / g + g c                    where the link keeps up with the computing (L <= T)
    (L - T) + T / g + g c          where it does not: it only starts earlier

with c the fixed cost of a group: of each sequence's segment in it, what a read costs its sink whatever its size, and
what announcing it costs the source. Both are least at g = sqrt(min(L, T) / c), and there g c <= min(L, T): the number
of the groups alone never makes their reads take longer than the step.

One group is enough where a later step of the same prompt follows and the link keeps up: its computing hides all of L.

c and 1 / BW are the intercept and the slope of a line through the reads (bytes, seconds) that sinks report: weighted
least squares, older reads fading. Each has the weight 1 / seconds^2, so that all sizes count alike by their relative
error, and one slow outlier (the first read of a new connection) counts little.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

FADE = 0.98  # a read's weight after each later one: about 50 count
FADE_STEPS = 0.8  # of steps, and of announcements: about 5 count
MIN_READ_S, MAX_READ_S = 1e-7, 3600.0
MAX_READ_BYTES = 1 << 40
MIN_SPREAD = 0.05  # of the sizes, as (standard deviation / mean)^2: below, they are one size
MIN_COST_S = 20e-6  # cost of one more segment: a wake-up on either side
NUM_TRIED = 2  # groups, while all measured reads had one size


@dataclass(frozen=True, slots=True)
class Line:
    """Cost of reads: n bytes take `fixed_s` + n * `byte_s` seconds."""

    fixed_s: float
    byte_s: float


class ReadCost:
    """Line fitted to the reported reads."""

    def __init__(self) -> None:
        self._w = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Add a read. Impossible values are ignored: sinks are other processes."""
        if not (0 < num_bytes <= MAX_READ_BYTES and MIN_READ_S <= seconds <= MAX_READ_S):
            return
        weight, x = seconds**-2, float(num_bytes)
        self._w = self._w * FADE + weight
        self._x = self._x * FADE + weight * x
        self._y = self._y * FADE + weight * seconds
        self._xx = self._xx * FADE + weight * x * x
        self._xy = self._xy * FADE + weight * x * seconds

    @property
    def is_measured(self) -> bool:
        return self._w > 0

    def line(self) -> Line | None:
        """The fitted line; None where reads of at most one size were measured, which do not determine it."""
        if not self.is_measured:
            return None
        mean_x, mean_y = self._x / self._w, self._y / self._w
        variance = self._xx / self._w - mean_x**2
        if variance < MIN_SPREAD * mean_x**2:
            return None
        byte_s = max((self._xy / self._w - mean_x * mean_y) / variance, 0.0)
        return Line(max(mean_y - byte_s * mean_x, 0.0), byte_s)


class _Mean:
    """Mean of the values, in which recent ones have more weight."""

    def __init__(self) -> None:
        self._weight = self._sum = 0.0

    def add(self, value: float, count: float = 1.0) -> None:
        self._weight = self._weight * FADE_STEPS + count
        self._sum = self._sum * FADE_STEPS + value

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0


class SegmentCost:
    """Costs that one source has measured of its hand-offs. Not shared between threads."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._reads = ReadCost()
        self._announce = _Mean()  # seconds a segment, here
        self._token = _Mean()  # seconds of computing a prefill token

    def add_reads(self, reads: Iterable[tuple[int, float]]) -> None:
        """Add (bytes, seconds) of reads that a sink reports; unchecked."""
        for num_bytes, seconds in reads:
            self._reads.add(num_bytes, seconds)

    def add_announcements(self, num_segments: int, seconds: float) -> None:
        self._announce.add(seconds, num_segments)

    def add_step(self, num_tokens: int, seconds: float) -> None:
        self._token.add(seconds, num_tokens)

    def num_groups(self, num_bytes: int, num_segments: int, num_tokens: int, *, is_last: bool) -> int:
        """Choose for a step that computes `num_tokens` tokens, of which `num_bytes` of KV are announced, of
        `num_segments` sequences. `is_last`: for one of them at least, it is the last step before its seal."""
        compute_s = num_tokens * self._token.value
        if not (self._reads.is_measured and num_segments and compute_s):
            return 1
        line = self._reads.line()
        if line is None:
            return min(NUM_TRIED, self._num_layers)
        read_s = num_bytes * line.byte_s
        if read_s <= compute_s and not is_last:
            return 1
        group_s = num_segments * max(line.fixed_s + self._announce.value, MIN_COST_S)
        best = math.floor(math.sqrt(min(read_s, compute_s) / group_s))
        return min(max(best, 1), self._num_layers)


def group_ends(num_layers: int, num_groups: int) -> tuple[int, ...]:
    """Number of layers after which each of `num_groups` groups of about one size ends."""
    assert 1 <= num_groups <= num_layers
    return tuple(num_layers * (i + 1) // num_groups for i in range(num_groups))
