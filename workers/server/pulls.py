"""The pulls of one worker: one task for each sequence, or prefix, whose KV is to come from another. One event loop.

pull ──> HandoffSink.pull ──> done: the sequence runs here
                 └─ failed ──> the engine frees its blocks, the router is told
pull_prefix: the same, but a failure ends nothing: the sequence is computed here
"""

import asyncio
import logging

from ...proto import worker_pb2
from ..common.errors import DiptychError, SequenceEnded
from ..engine.thread import EngineThread
from ..handoff.sink import HandoffSink
from .router_links import RouterLinks

PREFIX_TIMEOUT_S = 3.0  # a prefix that takes longer is computed
PREFIX_SHARE = 1 / 4  # nor may it take more of the time that the request has left
COMPUTING_SHARE = 1 / 2  # where its source computes it meanwhile: only that limits it

log = logging.getLogger("diptych.worker")


class Pulls:
    def __init__(self, engine: EngineThread, links: RouterLinks, sink: HandoffSink) -> None:
        self._engine = engine
        self._links = links
        self._sink = sink
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_bytes = 0  # pulled
        self._num_failed = 0  # pulls of sequences that have neither ended nor been aborted

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._sink.close()

    def pull(self, key: str, source: worker_pb2.HandoffSource, timeout_s: float) -> None:
        self._tasks[key] = asyncio.create_task(self._pull(key, source, timeout_s))

    def pull_prefix(self, key: str, source: worker_pb2.HandoffSource, timeout_s: float) -> None:
        self._tasks[key] = asyncio.create_task(self._pull_prefix(key, source, prefix_timeout_s(source, timeout_s)))

    def cancel(self, key: str) -> None:
        """End a pull. Idempotent."""
        task = self._tasks.get(key)
        if task is not None:
            # Not before its first step: a task that never began cleans nothing up.
            asyncio.get_running_loop().call_soon(task.cancel)

    async def _pull(self, key: str, source: worker_pb2.HandoffSource, timeout_s: float) -> None:
        try:
            result = await self._sink.pull(key, source, timeout_s)
            self._num_bytes += result.num_bytes
        except DiptychError as e:
            await self._engine.fail(key, quarantine=False)
            if self._links.has(key):
                self._num_failed += not isinstance(e, SequenceEnded)
                self._links.forget(key)
                self._links.send_failure(key, e, handoff=True)
        finally:
            self._tasks.pop(key, None)

    async def _pull_prefix(self, key: str, source: worker_pb2.HandoffSource, timeout_s: float) -> None:
        """Pull a prefix; where that fails, the sequence is computed here, and its router is not told."""
        try:
            result = await self._sink.pull(key, source, timeout_s)
            self._num_bytes += result.num_bytes
        except DiptychError as e:
            log.info("a prefix could not be pulled from %s: %s", source.address, e)
            await self._engine.fail(key, quarantine=False)
        finally:
            self._tasks.pop(key, None)

    def complete(self, load: worker_pb2.LoadReport) -> None:
        """Add the counts and statistics of the pulls to a load report."""
        load.handoff_bytes = self._num_bytes
        load.num_handoffs_failed = self._num_failed
        load.num_checksum_failures = self._sink.num_checksum_failures
        del load.links[:]  # it may be a report that is sent again
        load.links.extend(self._sink.transfer_stats())


def prefix_timeout_s(source: worker_pb2.HandoffSource, request_timeout_s: float) -> float:
    """Seconds for which a sequence waits for its prefix before it is computed here."""
    if source.is_computing:
        return COMPUTING_SHARE * request_timeout_s
    return min(PREFIX_TIMEOUT_S, PREFIX_SHARE * request_timeout_s)
