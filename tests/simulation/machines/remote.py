"""Calls between simulated processes as Ray carries them: to a process by the name of its actor. A call waits until that
process runs, and ends with it; whoever made it may be gone by then."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from diptych.workers.common.errors import DiptychError, WorkerLost

from .clock import ProcessLoop, SimFuture
from .network import Network

NEWS_S = 0.05  # until a death is known, at most

T = TypeVar("T")


@dataclass(eq=False)
class _Call:
    caller: ProcessLoop
    method: Callable[[], Awaitable[Any]]
    answered: SimFuture

    def answer(self, answer: object, error: DiptychError | None) -> None:
        """Complete the call in the caller's process."""
        if self.answered.done():
            return
        if error is None:
            self.answered.set_result(answer)
        else:
            self.answered.set_exception(error)


class Actor:
    """Named, placed, run, dead. `name` is its host's on the network."""

    def __init__(self, network: Network, name: str) -> None:
        self.name = name
        self.died_at = float("inf")
        self.process: ProcessLoop | None = None
        self._network = network
        self._calls: dict[_Call, None] = {}
        self._waiting: list[_Call] = []

    @property
    def is_dead(self) -> bool:
        return self.died_at <= self._network.clock.now

    async def ask(self, method: Callable[[], Awaitable[T]]) -> T:
        """The answer of its process, or the DiptychError that the method raised there. Raises WorkerLost where it dies
        first."""
        caller = asyncio.get_running_loop()
        assert isinstance(caller, ProcessLoop)
        call = _Call(caller, method, caller.create_future())
        if self.is_dead:
            self._lose(call, WorkerLost("its process died before the call"))
        else:
            self._calls[call] = None
            self._network.send(caller, self.name, self._arrive, call)
        return await call.answered

    def run_in(self, process: ProcessLoop) -> None:
        self.process = process
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self._network.deliver(process, self._begin, call)

    def die(self, error: DiptychError) -> None:
        """Idempotent."""
        self.died_at = min(self.died_at, self._network.clock.now)
        calls, self._calls = self._calls, {}
        for call in calls:
            self._lose(call, error)

    def _arrive(self, call: _Call) -> None:
        if self.process is None:
            self._waiting.append(call)
        else:
            self._network.deliver(self.process, self._begin, call)

    def _begin(self, call: _Call) -> None:
        assert self.process is not None
        self.process.create_task(self._serve(call))

    async def _serve(self, call: _Call) -> None:
        answer, error = None, None
        try:
            answer = await call.method()
        except DiptychError as e:
            error = e
        assert self.process is not None
        self._network.send(
            self.process, call.caller.name, self._network.deliver, call.caller, self._end, call, answer, error
        )

    def _end(self, call: _Call, answer: object, error: DiptychError | None) -> None:
        """End a call once its answer has arrived: until then the call ends with the process."""
        self._calls.pop(call, None)
        call.answer(answer, error)

    def _lose(self, call: _Call, error: DiptychError) -> None:
        network = self._network
        network.clock.after(network.rng.random() * NEWS_S, network.deliver, call.caller, call.answer, None, error)
