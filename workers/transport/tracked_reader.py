"""Base of readers whose reads run on another thread: waited for with a limit, and tracked to their end."""

import asyncio
from concurrent.futures import Future

from ..common.errors import TransportError
from .base import KVReader

READ_TIMEOUT_S = 20.0
SLOWEST_BYTES_S = 20e6  # a link slower than this counts as broken
SETTLE_S = 10.0  # then `cut` ends the running read, if possible


class TrackedReader(KVReader):
    """Tracks the futures of reads. A future is done only when no byte of its read can arrive any more."""

    def __init__(self) -> None:
        self._landing: set[Future[None]] = set()

    async def cut(self) -> None:
        """End the reads under way, where the transport can."""

    async def wait_for(self, num_bytes: int, *landing: "Future[None]") -> None:
        """Wait for all parts of a read. Raises what a future raises, once all are done, or a TransportError when it
        takes too long."""
        landed: list[asyncio.Future[None]] = []
        for part in landing:
            self._landing.add(part)
            part.add_done_callback(self._landing.discard)
            landed.append(asyncio.wrap_future(part))
            landed[-1].add_done_callback(asyncio.Future.exception)  # not a loss if no result is needed any more
        timeout = READ_TIMEOUT_S + num_bytes / SLOWEST_BYTES_S
        # Unlike wait_for, it does not cancel the read when it is cancelled.
        _, late = await asyncio.wait(landed, timeout=timeout)
        if late:
            raise TransportError(f"a read of {num_bytes:,} bytes did not end in {timeout:.0f} s", may_still_land=True)
        for part in landed:
            part.result()

    async def settled(self) -> None:
        landing = [asyncio.wrap_future(future) for future in list(self._landing)]
        if not landing:
            return
        _, late = await asyncio.wait(landing, timeout=SETTLE_S)
        if late:
            await self.cut()
        await asyncio.gather(*landing, return_exceptions=True)  # how they ended is of no interest any more
