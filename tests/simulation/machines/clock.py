"""Virtual time, and an asyncio event loop for each simulated process. No thread, no socket, no sleep.

    Clock        one queue of events for the whole world; `now` jumps from one to the next
    ProcessLoop  what asyncio sees in one process: it can be killed (nothing of it ever runs again), and stopped for a
                 while (what falls due meanwhile runs afterwards, timers before or after what arrived). Its own clock
                 begins anywhere, is a little fast or slow, and may jump ahead, as after a machine's sleep

Everything that asyncio orders by hash is ordered by number here: a seed gives the same run in every process.
"""

import asyncio
import heapq
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any

from ..checks.violation import Hang

MAX_EVENTS = 200_000
MAX_CALLS = 20_000  # of one process at one moment
MAX_DRIFT = 0.003
THREAD_S = 0.02  # longest time until a thread has done its work


class Timer:
    __slots__ = ("act", "args", "context", "due")

    def __init__(self, due: float, act: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> None:
        self.due = due
        self.act: Callable[..., object] | None = act
        self.args = args
        self.context = context

    def when(self) -> float:
        return self.due

    def cancel(self) -> None:
        self.act = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.act is None


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self.running: ProcessLoop | None = None  # the last to run: setting it costs a system call
        self._queue: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def at(self, when: float, act: Callable[..., object], *args: Any) -> Timer:
        timer = Timer(max(when, self.now), act, args, None)
        heapq.heappush(self._queue, (timer.due, next(self._numbers), timer))
        return timer

    def after(self, delay: float, act: Callable[..., object], *args: Any) -> Timer:
        return self.at(self.now + delay, act, *args)

    def advance(self, act: Callable[..., object], seconds: float) -> None:
        """All timers of `act` are due so much sooner."""
        mine = [timer for _, _, timer in self._queue if timer.act == act]
        for timer in mine:
            self.at(timer.due - seconds, act, *timer.args)
            timer.cancel()

    def run_until(self, end: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= end:
            self.now, _, timer = heapq.heappop(queue)
            if timer.act is not None:
                self.num_events += 1
                if self.num_events > MAX_EVENTS:
                    raise Hang(f"{MAX_EVENTS} events, and no end")
                timer.act(*timer.args)
        self.now = max(self.now, end)


class SimTask(asyncio.Task[Any]):
    """Sets of tasks iterate in the order of these numbers, not of addresses."""

    def __init__(self, coro: Coroutine[Any, Any, Any], loop: "ProcessLoop", **kwargs: Any) -> None:
        self._number = loop.next_number()
        super().__init__(coro, loop=loop, **kwargs)

    def __hash__(self) -> int:
        return self._number


class SimFuture(asyncio.Future[Any]):
    def __init__(self, loop: "ProcessLoop") -> None:
        self._number = loop.next_number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one process. `on_crash` receives uncaught exceptions."""

    def __init__(self, clock: Clock, rng: random.Random, name: str, on_crash: Callable[[str, object], None]) -> None:
        self.clock = clock
        self.name = name
        self.is_dead = False
        self.stalled_until = 0.0
        self.tasks: list[SimTask] = []
        self.on_go_on: list[Callable[[], object]] = []  # of what else runs in this process
        self._rng = rng
        self._on_crash = on_crash
        self._ready: deque[Timer] = deque()
        self._late_timers: deque[Timer] = deque()  # fell due while the process was stopped
        self._is_due = False
        self._next = 0
        self._rate = 1.0 + rng.uniform(-MAX_DRIFT, MAX_DRIFT)
        self._offset_s = rng.uniform(0.0, 1e5)

    def next_number(self) -> int:
        self._next += 1
        return self._next

    def kill(self) -> None:
        self.is_dead = True
        self._ready.clear()
        self._late_timers.clear()

    def stall(self, until: float) -> None:
        self.stalled_until = max(self.stalled_until, until)

    def go_on(self) -> None:
        """SIGCONT."""
        self.stalled_until = min(self.stalled_until, self.clock.now)
        self.clock.at(self.clock.now, self._run)
        for act in self.on_go_on:
            self.clock.at(self.clock.now, act)

    def jump(self, seconds: float) -> None:
        """Its clock, ahead: what falls due by it does so at once."""
        self._offset_s += seconds
        self.clock.advance(self._fire, seconds / self._rate)

    @property
    def is_stalled(self) -> bool:
        return self.clock.now < self.stalled_until

    def dispose(self) -> None:
        """Close the rest, so that nothing runs when it is collected."""
        self.kill()
        asyncio._set_running_loop(self)
        while self.tasks:
            tasks, self.tasks = self.tasks, []  # closing some may create others
            for task in tasks:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    try:
                        task.get_coro().close()  # type: ignore[union-attr]
                    except RuntimeError:
                        continue  # a cleanup that awaits, in an ended process

    def time(self) -> float:
        """Time by the process's own clock."""
        return self.local(self.clock.now)

    def local(self, when: float) -> float:
        """Convert a time of the world to the process's own clock."""
        return self._offset_s + when * self._rate

    def world_time(self, when: float) -> float:
        return (when - self._offset_s) / self._rate

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Timer:
        timer = Timer(self.clock.now, callback, args, context)
        self._ready.append(timer)
        self._make_due()
        return timer

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Timer:
        timer = Timer(when, callback, args, context)
        self.clock.at(self.world_time(when), self._fire, timer)
        return timer

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Timer:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def create_future(self) -> SimFuture:
        return SimFuture(self)

    def create_task(self, coro: Coroutine[Any, Any, Any], *, name: Any = None, context: Any = None) -> SimTask:
        task = SimTask(coro, self, context=context)
        self.tasks.append(task)
        if len(self.tasks) > 256:
            self.tasks = [t for t in self.tasks if not t.done()]
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> SimFuture:
        """Run a function on a thread, which takes a moment and does its work whether anybody waits or not."""
        future = self.create_future()

        def run() -> None:
            outcome, tell = None, future.set_result
            try:
                outcome = func(*args)
            except Exception as e:
                outcome, tell = e, future.set_exception
            if not future.cancelled():
                tell(outcome)

        if self._rng.random() < 0.5:
            run()
        else:
            self.call_later(self._rng.random() * THREAD_S, run)
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_dead:
            error = context.get("exception")
            self._on_crash(f"{self.name}: {context['message']}: {error!r}", error)

    def _fire(self, timer: Timer) -> None:
        if self.is_dead or timer.act is None:
            return
        (self._late_timers if self.is_stalled else self._ready).append(timer)
        self._make_due()

    def _make_due(self) -> None:
        if not self._is_due and not self.is_dead:
            self._is_due = True
            self.clock.at(self.stalled_until, self._run)

    def _run(self) -> None:
        if self.is_dead:
            return
        if self.is_stalled:
            self.clock.at(self.stalled_until, self._run)
            return
        if self._late_timers:
            late, self._late_timers = self._late_timers, deque()
            timers_first = self._rng.random() < 0.5  # select() may report either first
            self._ready = deque([*late, *self._ready]) if timers_first else deque([*self._ready, *late])
        if self.clock.running is not self:
            self.clock.running = self
            asyncio._set_running_loop(self)
        ready, num_called = self._ready, 0
        while ready and not self.is_dead and not self.is_stalled:
            num_called += 1
            if num_called > MAX_CALLS:
                raise Hang(f"{self.name} calls {MAX_CALLS} times at one moment, and no end")
            timer = ready.popleft()
            if timer.act is not None:
                self._call(timer)
        self._is_due = False
        if self._ready:
            self._make_due()

    def _call(self, timer: Timer) -> None:
        act = timer.act
        assert act is not None
        try:
            if timer.context is None:
                act(*timer.args)
            else:
                timer.context.run(act, *timer.args)
        except Exception as e:
            self._on_crash(f"{self.name}: {type(e).__name__} in {act!r}: {e}", e)
            raise


def dispose(processes: Sequence[ProcessLoop]) -> None:
    """End the rest of a world, so that nothing of it runs or complains when it is collected."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        for process in processes:
            process.dispose()
    finally:
        asyncio._set_running_loop(None)
        sys.unraisablehook = hook
