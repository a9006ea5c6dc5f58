"""Forecasts of a rate: Holt's exponential smoothing with a damped trend, and a factor for each hour of the day. Pure.

    level'  = α · x / season(t) + (1 - α) · (level + φ · trend)
    trend'  = β · (level' - level) + (1 - β) · φ · trend
    x(t+h)  = (level + trend · (φ + φ² + .. + φ^h)) · season(t + h)

(Hyndman and Athanasopoulos, Forecasting: Principles and Practice, §8.2; Gardner and McKenzie 1985.) The factor of an
hour is its mean by the mean of all hours of which there is a day's history; 1 until then.
"""

from dataclasses import dataclass, field

LEVEL_WEIGHT = 0.2  # α, by look
TREND_WEIGHT = 0.1  # β
DAMPING = 0.95  # φ: a trend goes on for 20 looks
HOURS = 24
HOUR_S = 3600.0
SEASON_WEIGHT = 1e-3  # of a look in its hour's mean
LEAST_FACTOR = 0.1  # of an hour in which there is usually almost nothing: what comes then tells little of other hours
LOOKS_OF_AN_HOUR = 600  # before its mean counts


@dataclass(slots=True)
class Holt:
    """Forecast of a quantity that is seen at equal intervals."""

    level: float = 0.0
    trend: float = 0.0  # by interval
    num_seen: int = 0

    def see(self, value: float) -> None:
        self.num_seen += 1
        if self.num_seen == 1:
            self.level = value
            return
        expected = self.level + DAMPING * self.trend
        level = LEVEL_WEIGHT * value + (1 - LEVEL_WEIGHT) * expected
        self.trend = TREND_WEIGHT * (level - self.level) + (1 - TREND_WEIGHT) * DAMPING * self.trend
        self.level = level

    def ahead(self, num_intervals: float) -> float:
        """Return the value that is expected so many intervals after the last one seen; never below 0."""
        damped = DAMPING * (1 - DAMPING**num_intervals) / (1 - DAMPING)
        return max(self.level + self.trend * damped, 0.0)


@dataclass(slots=True)
class HoursOfDay:
    """Factor of each hour of the day, of those that have been seen."""

    means: list[float] = field(default_factory=lambda: [0.0] * HOURS)
    num_seen: list[int] = field(default_factory=lambda: [0] * HOURS)

    def see(self, time_of_day_s: float, value: float) -> None:
        hour = _hour(time_of_day_s)
        self.num_seen[hour] += 1
        self.means[hour] += max(SEASON_WEIGHT, 1 / self.num_seen[hour]) * (value - self.means[hour])

    def factor(self, time_of_day_s: float) -> float:
        """Return what is usual at that time, in the mean of all hours; 1 while there is no history of a day."""
        if min(self.num_seen) < LOOKS_OF_AN_HOUR:
            return 1.0
        mean = sum(self.means) / HOURS
        return self.means[_hour(time_of_day_s)] / mean if mean > 0 else 1.0


@dataclass(slots=True)
class Forecast:
    """Forecast of a rate: level and trend of its hours, and what the hours to come are usually like."""

    holt: Holt = field(default_factory=Holt)
    hours: HoursOfDay = field(default_factory=HoursOfDay)
    _time_of_day_s: float = 0.0

    def see(self, time_of_day_s: float, value: float) -> None:
        """Take the rate of the last second."""
        self._time_of_day_s = time_of_day_s
        self.hours.see(time_of_day_s, value)
        self.holt.see(value / self._factor(0.0))

    def ahead(self, seconds: float) -> float:
        """Return the rate that is expected in so many seconds."""
        return self.holt.ahead(seconds) * self._factor(seconds)

    def _factor(self, seconds: float) -> float:
        return max(self.hours.factor(self._time_of_day_s + seconds), LEAST_FACTOR)


def _hour(time_of_day_s: float) -> int:
    return int(time_of_day_s // HOUR_S) % HOURS
