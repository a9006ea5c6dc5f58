"""Variation of the time of steps, as a profile found it: factors that are drawn anew for each run of steps. Seeded."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import numpy as np

HOLD_S = 0.25  # a factor lasts about so long: what slows a step slows those after it


@dataclass(frozen=True, slots=True)
class Noise:
    """`shares`, `factors`: of the distribution; its mean is 1."""

    shares: tuple[float, ...]
    factors: tuple[float, ...]
    seed: int = 0

    @classmethod
    def of(cls, percentiles: Mapping[int, float], seed: int) -> "Noise | None":
        """Distribution that is linear between percentiles; None where none are known."""
        if len(percentiles) < 2:
            return None
        shares = [percent / 100 for percent in sorted(percentiles)]
        factors = np.array([percentiles[percent] for percent in sorted(percentiles)])
        drawn = np.interp(np.linspace(0.0005, 0.9995, 1000), shares, factors)
        return cls(tuple(shares), tuple((factors / drawn.mean()).tolist()), seed)

    def source(self, worker: str) -> Random:
        """Random numbers of a worker."""
        return Random(f"{self.seed} {worker}")

    def draw(self, source: Random) -> float:
        return float(np.interp(source.random(), self.shares, self.factors))
