"""Runs an Engine on a thread of its own. Commands from other threads queue up and run between steps."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from ..common.cores import bind_this_thread
from ..common.errors import DiptychError, InternalError, RankLost, Unavailable
from ..common.timings import PullTimes
from ..handoff.types import Reservation, Seal
from .engine import Engine
from .events import StepOutput

T = TypeVar("T")
IDLE_WAIT_S = 1.0

log = logging.getLogger("diptych.engine")


class EngineThread:
    """`listener` is called on the engine's thread with every non-empty StepOutput, also while a step runs, with what
    hand-offs have to say; it must not block. `on_broken` is called there when the thread ends by a fault of ours, the
    books being in doubt, or because it lost what computes: then the worker should end. The thread stays on
    the first of `cores`, where there are any."""

    def __init__(
        self,
        engine: Engine,
        listener: Callable[[StepOutput], None],
        on_broken: Callable[[DiptychError], object],
        cores: Sequence[int] | None = None,
    ) -> None:
        self._engine = engine
        self._listener = listener
        self._on_broken = on_broken
        self._cores = cores
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_stopping = False
        self._has_ended = False  # nothing runs commands any more
        self._calls: set[Future[Any]] = set()  # that another thread waits for
        self._thread = threading.Thread(target=self._run, name="diptych-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the current step and end the thread. Idempotent."""
        self._is_stopping = True
        self._commands.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join()

    def post(self, command: Callable[[Engine], object]) -> None:
        """Run `command` between steps; its result is dropped."""
        self._commands.put(lambda: command(self._engine))

    async def call(self, command: Callable[[Engine], T]) -> T:
        """Run `command` between steps and return what it returns or raises. It runs even if the caller is cancelled.
        Raises Unavailable where the thread ends before."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(command(self._engine))
            except (DiptychError, AssertionError) as e:
                future.set_exception(e)

        self._calls.add(future)
        self._commands.put(run)
        if self._has_ended:
            self._refuse_calls()
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._calls.discard(future)

    async def reserve(self, key: str, num_tokens: int) -> Reservation:
        """Wait until the blocks are reserved. Raises RequestAborted when the request ends first."""
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[Reservation] = loop.create_future()

        def settle(result: Reservation | DiptychError) -> None:
            if granted.done():
                return
            if isinstance(result, DiptychError):
                granted.set_exception(result)
            else:
                granted.set_result(result)

        self.post(
            lambda engine: engine.incoming.reserve(
                key, num_tokens, lambda result: loop.call_soon_threadsafe(settle, result)
            )
        )
        return await granted

    def begin(self, key: str, seal: Seal) -> None:
        self.post(lambda engine: engine.begin(key, seal))

    async def commit(self, key: str, seal: Seal, times: PullTimes) -> None:
        await self.call(lambda engine: engine.commit(key, seal, times))

    async def fail(self, key: str, quarantine: bool) -> None:
        with suppress(Unavailable):  # an engine that has ended holds no blocks
            await self.call(lambda engine: engine.fail_import(key, quarantine=quarantine))

    async def settle(self, key: str) -> None:
        with suppress(Unavailable):
            await self.call(lambda engine: engine.incoming.settle(key))

    def _run(self) -> None:
        bind_this_thread(self._cores[:1] if self._cores else None)  # where the first of a team computes
        try:
            self._run_until_stopped()
        except (RankLost, InternalError) as e:
            self._end()
            self._on_broken(e)
        except Exception as e:
            log.exception("the engine's thread failed by our own fault")
            self._end()
            self._on_broken(_internal(e))
        else:
            self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._refuse_calls()

    def _refuse_calls(self) -> None:
        """Refuse all waiting calls; on any thread."""
        while self._calls:
            with suppress(KeyError):  # another thread took the last
                future = self._calls.pop()
                if not future.done():
                    future.set_exception(Unavailable("the worker is stopping"))

    def _run_until_stopped(self) -> None:
        idle = False
        while not self._is_stopping:
            self._run_commands(wait=idle)
            try:
                output = self._engine.step(self._listener)
            except RankLost:
                raise  # no further step is possible
            except Exception as e:
                # The top loop: one bad batch must not take the worker's other requests with it.
                log.exception("a step failed")
                ended = self._engine.step_failed(e)
                names = ", ".join(ended) or "nothing"
                text = "the step that failed ends %s here; routers try them once more"
                log.error(text, names, extra={"request_ids": ended})
                idle = False  # the next step reports them
                continue
            if output:
                self._listener(output)
            idle = not output.ran
            if idle:  # about once in IDLE_WAIT_S, and whenever a command comes
                self._engine.steps.check_runner()
        self._run_commands(wait=False)  # other threads may wait for their end

    def _run_commands(self, *, wait: bool) -> None:
        try:
            if wait:
                self._commands.get(timeout=self._idle_s())()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _idle_s(self) -> float:
        return min(max(self._engine.next_deadline() - time.monotonic(), 0.0), IDLE_WAIT_S)


def _internal(error: BaseException) -> InternalError:
    """The error that a peer sees for a bug of ours."""
    return InternalError(f"the engine failed ({type(error).__name__}: {error}); the worker's log has the traceback")
