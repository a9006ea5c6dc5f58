"""RowCost: the time of a step of nothing but decodes by its number of rows, learnt from steps. Pure: times come in.

    seconds = level · shape(rows)

`shape` goes through one point for each number of rows that was measured (of many rows: each 6 %), with straight lines
between them, and never falls: points that contradict each other are merged by weight (isotonic regression by pooling
adjacent violators, Barlow et al. 1972). `level` follows quickly what changes all steps alike, such as longer contexts,
so that points measured at other times can be compared. A point that is not measured any more loses weight and is
forgotten in the end: then it is tried again, so that one slow step forbids nothing for ever.

Beyond the most rows that were seen, the last line goes on; where there is none, rows are assumed to cost little: it is
worth finding out. `reach` says how far to go.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from .lengths import MARGIN

DOUBLING = 0.25  # of its time that a step is assumed to take longer with twice the rows
FEW_ROWS = 16  # ... or with so many more
LEVEL_RATE, SHAPE_RATE = 0.2, 0.05  # of the difference that one step corrects
OUTLIER = 2.0  # a step counts as at most this many times its predicted time
MOST_WEIGHT = 16.0  # of a point, in steps
HALF_LIFE = 512  # steps that halve the weight of a point that is not measured
LEAST_WEIGHT = 1 / 16  # less is forgotten
CHANGED = 0.01  # of a point, that has the curve drawn again
YOUNG = 8  # steps of a point, each of which has it drawn again
REDRAWN = 64  # steps after which it is drawn again in any case
# Steps with drafts after which one without is measured anew: where none was, twice as many for each that was, at most.
FIRST_REFRESHED, REFRESHED = 4, 128


@dataclass(slots=True)
class _Point:
    rows: float
    shape: float
    num_steps: float = 1.0
    last_step: int = 0
    drawn: float = 0.0  # shape when the curve was drawn

    def weight(self, step: int) -> float:
        return min(self.num_steps, MOST_WEIGHT) * 0.5 ** ((step - self.last_step) / HALF_LIFE)


class RowCost:
    def __init__(self) -> None:
        self._points: dict[int, _Point] = {}
        self._level = 1.0
        self._step = 0
        self._drawn_at = 0
        self._rows: list[float] = []  # the curve: ascending
        self._shapes: list[float] = []  # never falling

    @property
    def least_rows(self) -> float:
        """Least number of rows that was measured; infinite: none."""
        return self._rows[0] if self._rows else math.inf

    @property
    def reach(self) -> int:
        """The most rows of which a step's time is worth guessing: half as many again as the most known, and eight."""
        return int(self._rows[-1] * 1.5) + 8 if self._rows else FEW_ROWS

    def steps_since(self, num_rows: int) -> int:
        """Steps since one with about so many rows was measured; all, if none was."""
        point = self._points.get(_bucket(num_rows))
        return self._step - point.last_step if point else self._step

    def is_old(self, num_rows: int, num_drafted: int) -> bool:
        """Return whether the time of a step without drafts is to be measured again, where so many steps with drafts
        followed the last one that was: soon, as long as it was measured seldom. Every gain is compared with it."""
        point = self._points.get(_bucket(num_rows))
        wait = min(REFRESHED, FIRST_REFRESHED << min(int(point.num_steps), 16)) if point else FIRST_REFRESHED
        return num_rows < self.least_rows or (num_drafted >= wait and self.steps_since(num_rows) >= wait)

    def add(self, num_rows: int, seconds: float) -> None:
        """Add a measured step. A time that cannot be is ignored."""
        if not (seconds > 0 and math.isfinite(seconds)) or num_rows <= 0:
            return
        self._step += 1
        if not self._points:
            self._level = seconds / self._shape(num_rows)
        bucket = _bucket(num_rows)
        point = self._points.get(bucket)
        if point is None or point.weight(self._step) < LEAST_WEIGHT:
            shape = self._shape(num_rows) * min(seconds / self.seconds(num_rows), OUTLIER)
            self._points[bucket] = _Point(num_rows, shape, last_step=self._step)
            self._draw()
            return
        ratio = min(seconds / (self._level * point.shape), OUTLIER)
        self._level *= ratio**LEVEL_RATE
        point.num_steps += 1
        rate = max(SHAPE_RATE, 2 / (point.num_steps + 1))  # the first steps find nothing in caches, and count less
        point.shape *= ratio ** (rate * (1 - LEVEL_RATE))
        point.rows += rate * (num_rows - point.rows)
        point.last_step = self._step
        has_changed = point.num_steps <= YOUNG or abs(point.shape - point.drawn) > CHANGED * point.drawn
        if has_changed or self._step - self._drawn_at >= REDRAWN:
            self._draw()

    def skip(self, num_steps: int) -> None:
        """Count steps that nobody measures: what is known grows older."""
        self._step += num_steps

    def seconds(self, num_rows: int) -> float:
        """Predict the seconds of a step; 1.0 at one row where none was measured. O(log points)."""
        return self._level * self._shape(num_rows)

    def table(self, num_rows: int, count: int) -> list[float]:
        """Predict the seconds of steps of `num_rows` rows, of one more, and so on: `count` + 1 of them. O(count)."""
        found: list[float] = []
        last, level = num_rows + count, self._level
        while num_rows <= last:
            right = bisect_left(self._rows, num_rows)
            end = min(last, int(self._rows[right])) if right < len(self._rows) else last  # of this line
            first = level * self._shape(num_rows)
            slope = (level * self._shape(end) - first) / max(end - num_rows, 1)
            found += [first + slope * i for i in range(end - num_rows + 1)]
            num_rows = end + 1
        return found

    def least_gain(self, num_rows: int, room: int, beside: float = 0.0) -> float:
        """Least probability p of acceptance with which some of `room` more rows could pay in a step of `num_rows`.
        beside: of the step, what drafts take beside their rows. With m rows a step must yield more by the share s by
        which it takes longer (and `MARGIN`): of the n tokens that it yields anyway, n · s. They give m · p at most, and
        drafts of n sequences n · (p + p² + ...) = n · p / (1 - p)."""
        base, more, least = self._shape(num_rows), 1, math.inf
        while more <= room:
            share = (1 + MARGIN) * (self._shape(num_rows + more) / base + beside) - 1
            least = min(least, max(num_rows * share / more, share / (1 + share)))
            more *= 2
        return least

    def _shape(self, num_rows: float) -> float:
        rows, shapes = self._rows, self._shapes
        if not rows:
            return _assumed(1, num_rows)
        right = bisect_left(rows, num_rows)
        if right == len(rows):
            return self._beyond(num_rows)
        if right == 0:  # fewer rows than were ever seen
            return shapes[0] / _assumed(num_rows, rows[0])
        left_rows, left = rows[right - 1], shapes[right - 1]
        return left + (shapes[right] - left) * (num_rows - left_rows) / (rows[right] - left_rows)

    def _beyond(self, num_rows: float) -> float:
        """Continue the line from the point at about half of the most rows known, if it rises more than is assumed."""
        rows, shapes = self._rows, self._shapes
        last_rows, last = rows[-1], shapes[-1]
        assumed = last * _assumed(last_rows, num_rows)
        before = max(bisect_right(rows, last_rows / 2) - 1, 0)
        if before == len(rows) - 1:
            return assumed
        slope = (last - shapes[before]) / (last_rows - rows[before])
        return max(assumed, last + slope * (num_rows - last_rows))

    def _draw(self) -> None:
        """Draw the curve through all points: O(points)."""
        weights = {bucket: point.weight(self._step) for bucket, point in self._points.items()}
        for bucket, weight in weights.items():
            if weight < LEAST_WEIGHT:
                del self._points[bucket]
        points = sorted(self._points.values(), key=lambda point: point.rows)
        pools: list[tuple[float, float, int]] = []  # shape, weight, number of points
        for point in points:
            point.drawn = point.shape
            shape, weight, count = point.shape, point.weight(self._step), 1
            while pools and pools[-1][0] > shape:
                other, other_weight, other_count = pools.pop()
                shape = (shape * weight + other * other_weight) / (weight + other_weight)
                weight, count = weight + other_weight, count + other_count
            pools.append((shape, weight, count))
        self._rows = [point.rows for point in points]
        self._shapes = [shape for shape, _, count in pools for _ in range(count)]
        self._drawn_at = self._step


def _assumed(rows: float, more: float) -> float:
    """Times as long that a step of `more` rows is assumed to take as one of `rows`."""
    return 1 + DOUBLING * (more - rows) / max(rows, FEW_ROWS)


def _bucket(num_rows: int) -> int:
    """Name of the numbers of rows that share a point: each alone up to 32, then 16 to a doubling."""
    shift = max(num_rows.bit_length() - 5, 0)
    return 16 * shift + (num_rows >> shift)
