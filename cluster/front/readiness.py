"""Tells load balancers and orchestrators whether to send a router requests; bounded in cost, whoever asks.

    leaving                      not ready, while open requests go on to their end
    no worker is available       not ready
    tokens are decoded           asked -> a worker has decoded since the last look: nothing is computed
                                       -> else one request of two tokens, the second by a decode step; all who ask
                                          meanwhile wait for the same one, and its result stands for a period

Where all workers may leave while there are no requests, none is made: it would keep them, or bring them back.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from ...workers.common.errors import DiptychError
from ...workers.common.request import Request, SamplingParams
from ..routing.token_source import Health, TokenSource

PERIOD_S = 10.0  # between two requests, and as long as a decode step counts as a proof
TIMEOUT_S = 4.0  # of a request; kubelets that ask wait a little longer
PROMPT = (0,)
NUM_TOKENS = 2  # the first token is the prefill's
LEAVING = "the router is leaving"
NO_WORKER = "no worker is available"


@dataclass(frozen=True, slots=True)
class DecodeHealth:
    """Answer to whether tokens are decoded. `decoded_s_ago`: seconds since the last decode step that is known of; None:
    of none. `problem`: why it is not ready."""

    ready: bool
    decoded_s_ago: float | None
    problem: str = ""


class Readiness:
    """State of one router, on its event loop. Times are in seconds, as `clock` counts them."""

    def __init__(
        self, source: TokenSource, timeout_s: float = TIMEOUT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._timeout_s = timeout_s
        self._now = clock
        self._is_leaving = False
        self._counts: Mapping[str, int] = {}  # of decoded tokens by worker, at the last look
        self._decoded_at: float | None = None
        self._tried_at: float | None = None
        self._trial: asyncio.Task[None] | None = None
        self._problem = ""  # of the last trial

    def leave(self) -> None:
        """Be ready no more."""
        self._is_leaving = True

    def health(self) -> Health:
        found = self._source.health()
        return replace(found, ready=found.ready and not self._is_leaving)

    async def decoding(self) -> DecodeHealth:
        """Tell whether tokens are decoded. Takes as long as a request may at most."""
        health = self.health()
        self._look(health)
        if self._is_leaving or not health.ready:
            return DecodeHealth(False, self._age_s(), LEAVING if self._is_leaving else NO_WORKER)
        if health.may_be_empty:
            return DecodeHealth(True, self._age_s())
        if not self._is_proved():
            await self._try()
        is_proved = self._is_proved()
        return DecodeHealth(is_proved, self._age_s(), "" if is_proved else self._problem)

    def _look(self, health: Health) -> None:
        """Note whether a worker has decoded since the last look."""
        before, self._counts = self._counts, health.decode_tokens
        if any(num > before.get(worker, num) for worker, num in self._counts.items()):
            self._decoded_at = self._now()

    async def _try(self) -> None:
        """Wait for the trial that runs, or for a new one, unless the last was within the period."""
        if self._trial is None and (self._tried_at is None or self._now() - self._tried_at >= PERIOD_S):
            self._tried_at = self._now()
            self._trial = asyncio.create_task(self._decode())
        if self._trial is not None:
            await asyncio.shield(self._trial)

    async def _decode(self) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        name = f"decode-probe-{secrets.token_hex(8)}"
        request = Request(name, PROMPT, sampling, self._timeout_s, speculates=False)
        try:
            async with asyncio.timeout(self._timeout_s), aclosing(self._source.stream(request)) as deltas:
                num = sum([len(delta.token_ids) async for delta in deltas])
            self._problem = "" if num == NUM_TOKENS else f"{num} tokens came instead of {NUM_TOKENS}"
        except TimeoutError:
            self._problem = f"no two tokens within {self._timeout_s:g} s"
        except DiptychError as e:
            self._problem = e.message
        finally:
            self._trial = None
        if not self._problem:
            self._decoded_at = self._now()
        self._look(self.health())  # workers that are too busy for one request more have decoded meanwhile

    def _is_proved(self) -> bool:
        return self._decoded_at is not None and self._now() - self._decoded_at <= PERIOD_S

    def _age_s(self) -> float | None:
        return None if self._decoded_at is None else self._now() - self._decoded_at
