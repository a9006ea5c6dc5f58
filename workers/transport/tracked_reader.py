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

    async def wait_for(self, landing: "Future[None]", num_bytes: int) -> None:
        """Wait for a read. Raises what its future raises, or a TransportError when it takes too long."""
        self._landing.add(landing)
        landing.add_done_callback(self._landing.discard)
        timeout = READ_TIMEOUT_S + num_bytes / SLOWEST_BYTES_S
        landed = asyncio.wrap_future(landing)
        landed.add_done_callback(asyncio.Future.exception)  # not a loss if no result is needed any more
        await asyncio.wait(
            [landed], timeout=timeout
        )  # unlike wait_for, it does not cancel the read when it is cancelled
        if not landed.done():
            raise TransportError(f"a read of {num_bytes:,} bytes did not end in {timeout:.0f} s", may_still_land=True)
        landed.result()

    async def settled(self) -> None:
        landing = [asyncio.wrap_future(future) for future in list(self._landing)]
        if not landing:
            return
        _, late = await asyncio.wait(landing, timeout=SETTLE_S)
        if late:
            await self.cut()
        await asyncio.gather(*landing, return_exceptions=True)  # how they ended is of no interest any more
