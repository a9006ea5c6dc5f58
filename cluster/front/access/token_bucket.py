"""Token bucket: how much may be used in a minute, and at once. Pure: who asks gives the time, in seconds."""

import math

ROUNDING = 1e-6  # that may be missing, for times are rounded


class TokenBucket:
    """Full at the start; refills evenly, by `per_minute` in a minute, to that or to `least`. May go below 0: what was
    used without being asked for is waited for by the next."""

    def __init__(self, per_minute: float, now: float, least: float = 0.0) -> None:
        self._least = least
        self._rate = per_minute / 60.0
        self.capacity = self._level = max(per_minute, least)
        self._at = now

    def wait_s(self, num: float, now: float) -> float:
        """Time until `num` can be taken; 0: now; infinite: never, as it is more than fits."""
        if num > self.capacity:
            return math.inf
        missing = num - self.level(now)
        return missing / self._rate if missing > ROUNDING else 0.0

    def take(self, num: float, now: float) -> None:
        """Negative: give back."""
        self._level = min(self.level(now) - num, self.capacity)

    def level(self, now: float) -> float:
        """Amount that can be taken; below 0 where more was used than there was."""
        self._level = min(self._level + max(now - self._at, 0.0) * self._rate, self.capacity)
        self._at = now
        return self._level

    def full_in_s(self, now: float) -> float:
        return (self.capacity - self.level(now)) / self._rate

    def resize(self, per_minute: float, now: float) -> None:
        """Change its rate. What has been used stays used."""
        missing = self.capacity - self.level(now)
        self._rate = per_minute / 60.0
        self.capacity = max(per_minute, self._least)
        self._level = self.capacity - missing
