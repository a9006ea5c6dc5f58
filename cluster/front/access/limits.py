"""Limits of one API key at one router: requests a minute, requests at a time, tokens a minute.

With several routers each enforces its share: the limit by the number of routers, at least one request.
"""

import math
import sys

from ....workers.common.errors import RateLimited
from ...common.quota import Quota, QuotaShare
from .key_file import KeyLimits
from .token_bucket import TokenBucket

DURATION_WEIGHT = 0.1  # of the newest call in the running mean
Header = tuple[str, str]


class Limits:
    def __init__(self, name: str, num_routers: int) -> None:
        self._name = name
        self._num_routers = num_routers
        self._running = Quota(sys.maxsize, "")
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self._mean_s = 1.0  # of a call

    @property
    def num_running(self) -> int:
        return self._running.num_held

    def set(self, limits: KeyLimits, now: float) -> None:
        """Take other limits. What was used before stays used."""
        running = limits.concurrent_requests
        self._running.most = sys.maxsize if running is None else max(running // self._num_routers, 1)
        self._requests = self._resized(self._requests, limits.requests_per_minute, now, least=1.0)
        self._tokens = self._resized(self._tokens, limits.tokens_per_minute, now)

    def begin(self, now: float) -> QuotaShare:
        """Take a request; the share holds its place. Raises RateLimited, and takes nothing then."""
        most = self._running.most
        if self._running.num_held >= most:
            wait_s = min(max(self._mean_s / most, 1.0), 60.0)
            raise self._refusal("concurrency", f"{most} requests at a time", wait_s)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1.0, now):
                raise self._refusal("requests", f"{self._requests.capacity:g} requests a minute", wait_s)
            self._requests.take(1.0, now)
        running = self._running.share()
        running.take(1)
        return running

    def end(self, duration_s: float) -> None:
        self._mean_s += DURATION_WEIGHT * (duration_s - self._mean_s)

    def reserve(self, num_tokens: int, now: float) -> None:
        """Raises RateLimited, and takes nothing then."""
        if self._tokens is None:
            return
        if wait_s := self._tokens.wait_s(num_tokens, now):
            what = f"{self._tokens.capacity:.0f} tokens a minute, and this request may need {num_tokens}"
            raise self._refusal("tokens", what, wait_s)
        self._tokens.take(num_tokens, now)

    def settle(self, num_reserved: int, num_used: int, now: float) -> None:
        """Give back what was reserved and not used, or take what was used beyond it."""
        if self._tokens is not None:
            self._tokens.take(num_used - num_reserved, now)

    def headers(self, now: float) -> list[Header]:
        """Headers as OpenAI sends them: x-ratelimit-{limit,remaining,reset}-{requests,tokens}."""
        found: list[Header] = []
        for what, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found += [
                    (f"x-ratelimit-limit-{what}", f"{bucket.capacity:.0f}"),
                    (f"x-ratelimit-remaining-{what}", f"{max(math.floor(bucket.level(now)), 0)}"),
                    (f"x-ratelimit-reset-{what}", f"{math.ceil(bucket.full_in_s(now) * 1e3)}ms"),
                ]
        return found

    def _resized(
        self, bucket: TokenBucket | None, per_minute: int | None, now: float, least: float = 0.0
    ) -> TokenBucket | None:
        if per_minute is None:
            return None
        share = per_minute / self._num_routers
        if bucket is None:
            return TokenBucket(share, now, least)
        bucket.resize(share, now)
        return bucket

    def _refusal(self, reason: str, limit: str, wait_s: float) -> RateLimited:
        helps = wait_s < math.inf
        remedy = f"try again in {math.ceil(wait_s)} s" if helps else "send a shorter one, or ask for fewer tokens"
        return RateLimited(
            f"rate limit reached: the API key {self._name!r} may have {limit} at this router: {remedy}",
            reason=reason,
            retry_after_s=wait_s if helps else 60.0,
            retry_helps=helps,
        )


HEADER_NAMES = tuple(f"x-ratelimit-{a}-{b}" for b in ("requests", "tokens") for a in ("limit", "remaining", "reset"))
