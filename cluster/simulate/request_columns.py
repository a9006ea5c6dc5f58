"""Columns in which a simulation keeps times and lengths of its requests: a million requests take tens of megabytes."""

from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

NOT_YET = -1.0
Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class RequestColumns:
    """Times (s) of each request that came, in the order in which they came: NOT_YET where there is none."""

    came: "array[float]" = field(default_factory=lambda: array("d"))
    first: "array[float]" = field(default_factory=lambda: array("d"))
    ended: "array[float]" = field(default_factory=lambda: array("d"))
    num_input: "array[int]" = field(default_factory=lambda: array("q"))
    num_output: "array[int]" = field(default_factory=lambda: array("q"))
    num_cached: "array[int]" = field(default_factory=lambda: array("q"))
    was_handed_off: "array[int]" = field(default_factory=lambda: array("b"))

    def add(self, now: float, num_input: int, num_output: int) -> int:
        """Add a request; returns its row."""
        self.came.append(now)
        self.first.append(NOT_YET)
        self.ended.append(NOT_YET)
        self.num_input.append(num_input)
        self.num_output.append(num_output)
        self.num_cached.append(0)
        self.was_handed_off.append(0)
        return len(self.came) - 1

    @property
    def num_ended(self) -> int:
        return int((np.frombuffer(self.ended) >= 0).sum()) if self.ended else 0

    def latencies(self) -> tuple[Floats, Floats, Floats]:
        """ttft, tpot and e2e of each request that ended; tpot is 0 for answers of one token, as the bench counts it."""
        came, first, ended = (np.array(each) for each in (self.came, self.first, self.ended))
        num_output = np.array(self.num_output)
        done = ended >= 0
        e2e, ttft = (ended - came)[done], (first - came)[done]
        tpot = (e2e - ttft) / np.maximum(num_output[done] - 1, 1)
        return ttft, tpot, e2e
