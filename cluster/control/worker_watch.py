"""Waits of the supervisor: for a process that starts, one that ends or hangs, a gang that has nothing left to do."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from ...workers.common.errors import ConfigError, DiptychError, InternalError, WorkerLost
from ...workers.common.tls import LinkTls
from ..common.handles import RouterHandle, RouterStarted, Startable, WorkerHandle, WorkerStarted
from ..common.heartbeat import Heartbeat, Silence
from .plan import Phase
from .worker_control import WorkerControl
from .worker_record import WorkerRecord

TICK_S = 1.0
PLACED_S = 3.0  # then it is worth a question why a worker has not started
DRAIN_POLL_S = 0.1
LAST_WORDS_S = 2.0  # between the ends of a gang's members, of which each notices the others'
# A worker reports every half second, a router answers in milliseconds: one that is silent for so many looks hangs, and
# is replaced.
SILENT_TICKS = 15
# While it starts, looks of PLACED_S each, once it is placed. It loads on a thread, beside the loop that answers: before
# that Ray makes its environment, and it imports, on cores that all who start share.
SILENT_START_LOOKS = 40
SILENT_NEW_LOOKS = 200  # before its first answer, if this supervisor starts it

Started = TypeVar("Started", WorkerStarted, RouterStarted)

log = logging.getLogger("diptych.supervisor")


async def until_usable(tls: LinkTls | None) -> None:
    """Wait until the certificate can be used, without which no worker can be called."""
    told = ""
    while tls:
        try:
            tls.load()
            return
        except ConfigError as e:
            if e.message != told:
                log.warning("no worker is taken over: %s", told := e.message)
        await asyncio.sleep(TICK_S)


async def until_started(
    handle: Startable[Started], on_wait: Callable[[str], None], timeout_s: float, *, is_new: bool
) -> Started:
    """Raises what its start raises, and WorkerLost where it hangs: it does not answer, or answers and has not started
    within `timeout_s`, placed. A load that hangs looks like one that is slow: it is on a thread, or in the process of
    another rank. `on_wait` is told what must come before it can be placed, or nothing. `is_new`: no earlier supervisor
    started it."""
    num_placed = 0  # looks
    num_first = SILENT_NEW_LOOKS if is_new else SILENT_START_LOOKS
    start, heartbeat = asyncio.ensure_future(handle.start()), Heartbeat(handle.alive, SILENT_START_LOOKS, num_first)
    try:
        while not (await asyncio.wait([start], timeout=PLACED_S))[0]:
            on_wait(waiting_for := await handle.waiting_for())
            if waiting_for:  # a process without a place cannot answer yet
                continue
            num_placed += 1
            if heartbeat.look():
                raise WorkerLost(f"it did not answer during its start for {heartbeat.limit * PLACED_S:g} s")
            if num_placed * PLACED_S >= timeout_s:
                raise WorkerLost(
                    f"it has not started within {timeout_s:g} s: its load hangs, or start_timeout_s is too short for it"
                )
        on_wait("")
        return start.result()
    finally:
        heartbeat.close()
        start.cancel()


async def until_lost(handle: RouterHandle) -> DiptychError:
    """Wait until the router is lost; return why: it died, or it hangs."""
    death, heartbeat = asyncio.ensure_future(handle.wait()), Heartbeat(handle.alive, SILENT_TICKS)
    try:
        while not (await asyncio.wait([death], timeout=TICK_S))[0]:
            if heartbeat.look():
                return WorkerLost(f"it did not answer for {SILENT_TICKS * TICK_S:g} s")
        return death.result()
    finally:
        heartbeat.close()
        death.cancel()


async def until_known(handle: WorkerHandle, opening: Coroutine[None, None, WorkerControl]) -> WorkerControl:
    """Return what `opening` returns. Raises what that raises, or why the process ended, whichever comes first."""
    opened, death = asyncio.ensure_future(opening), asyncio.ensure_future(handle.wait())
    try:
        await asyncio.wait([opened, death], return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            raise death.result()
        return opened.result()
    except asyncio.CancelledError:
        if not opened.cancel() and opened.exception() is None:  # it has just been opened, and no caller takes it
            await opened.result().close()
        raise
    finally:
        death.cancel()
        opened.cancel()


async def until_dead(worker: WorkerRecord, handle: WorkerHandle, control: WorkerControl) -> DiptychError:
    """Wait until the worker has ended; return why. Until then, keep its prefill budget as it should be."""
    death = asyncio.ensure_future(handle.wait())
    num_received, silence = -1, Silence(SILENT_TICKS)
    try:
        while True:
            done, _ = await asyncio.wait([death], timeout=TICK_S)
            if done:
                return death.result()
            if silence.look(has_answered=control.num_received != num_received):
                return WorkerLost(f"it did not answer for {SILENT_TICKS * TICK_S:g} s")
            num_received = control.num_received
            worker.keep_budget()
    finally:
        death.cancel()


async def last_words(worker: WorkerRecord, handle: WorkerHandle) -> DiptychError | None:
    """Return why a worker ends whose gang has lost another member; None where it does not end by itself."""
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            if worker.started is None:
                await handle.start()
            return await handle.wait()
    except TimeoutError:
        return None
    except DiptychError as e:
        return e


async def drain(gang: Sequence[WorkerRecord], timeout_s: float) -> None:
    """Returns when none of them has anything left, one ends or has wrong books, or after `timeout_s`. One that does not
    answer is asked again: it may well have something left."""
    deadline = time.monotonic() + timeout_s
    controls = [worker.control for worker in gang if worker.control]
    names = ", ".join(worker.worker_id for worker in gang)
    while time.monotonic() < deadline and all(worker.phase is Phase.DRAINING for worker in gang):
        try:
            if await _are_drained(controls):
                return
        except WorkerLost as e:
            log.info("%s is asked again whether it has anything left: %s", names, e)
        except InternalError as e:
            log.warning("%s cannot be drained: %s", names, e)
            return
        await asyncio.sleep(DRAIN_POLL_S)


async def _are_drained(controls: Sequence[WorkerControl]) -> bool:
    """Tells those to drain that do not."""
    told = [control for control in controls if not control.load.draining]
    for control in told:
        await control.drain()
    # Reports come by themselves; the books are compared, which costs a step, only for the last word.
    if told or any(control.num_requests for control in controls):
        return False
    for control in controls:
        if not await control.is_drained():
            return False
    return True
