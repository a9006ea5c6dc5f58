"""A small world for the hand-off's machines: engines with blocks, a bad network, reads that land late, kills, stalls.

A source engine computes a prompt's KV and hands it off; sinks try to pull it, one after the other or at once. Every
message may be late, lost, doubled or overtaken; streams break; processes stop for a while or for good. Freed blocks are
overwritten at once. What must never happen raises AssertionError where it happens; `check_end` tells what must.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from diptych.workers.errors import WorkerLost
from diptych.workers.handoff_types import Answer, SinkAction, SourceAction

from .handoff_actors import LEASE_S, TIMEOUT_S, Attempt, Process, SinkProcess, SourceProcess


@dataclass(frozen=True)
class Weather:
    """Probabilities and durations; a kind day by default."""

    loss: float = 0.0  # of a call or an answer
    double: float = 0.0
    slow: float = 0.0  # of a message that takes up to a lease instead of a moment
    stream_break: float = 0.0
    read_error: float = 0.0
    abort: float = 0.0  # by the source's engine
    refuse: float = 0.0  # by the sink's engine: no blocks
    cancel: float = 0.0  # of a pull
    stall: float = 0.0  # of either process, up to two leases
    impatience: float = 0.0  # the router tries another sink while the first still pulls


STORM = Weather(0.1, 0.1, 0.15, 0.1, 0.1, 0.05, 0.05, 0.1, 0.3, 0.2)
FOG = Weather(loss=0.3, slow=0.4, stall=0.7, impatience=0.5)  # little breaks, and nobody hears or sees in time


class World:
    def __init__(self, seed: int, weather: Weather, *, kill: str = "", kill_at_step: int = -1) -> None:
        self.rng = random.Random(seed)
        self.weather = weather
        self.now = 0.0
        self.num_steps = 0
        self.kill, self.kill_at_step = kill, kill_at_step
        self.outcomes: Counter[str] = Counter()
        self.commits: list[str] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._num_queued = 0
        self.source = SourceProcess(self, num_tokens=self.rng.randint(1, 24))
        self.sinks = [SinkProcess(self, num_blocks=8) for _ in range(3)]
        self.attempts: list[Attempt] = []
        self.stall_s = sum(self.maybe_stall(process) for process in (self.source, *self.sinks))
        self.at(self.rng.random() * LEASE_S / 2, self.try_a_sink)

    # The router: another sink when one failed, or when it loses patience

    def try_a_sink(self) -> None:
        if len(self.attempts) == len(self.sinks) or self.commits:
            return
        attempt = Attempt(self, self.sinks[len(self.attempts)], f"sink-{len(self.attempts)}")
        self.attempts.append(attempt)
        if self.happens(self.weather.impatience):
            self.at(self.now + self.rng.random() * LEASE_S, self.try_a_sink)
        self.watch(attempt)

    def watch(self, attempt: Attempt) -> None:
        if attempt.error is not None or attempt.sink.is_dead:
            self.try_a_sink()
        elif not attempt.machine.is_over:
            self.at(self.now + LEASE_S / 10, lambda: self.watch(attempt))

    # The network and time

    def happens(self, probability: float) -> bool:
        return self.rng.random() < probability

    def delay(self) -> float:
        return self.rng.random() * (LEASE_S if self.happens(self.weather.slow) else LEASE_S / 50)

    def at(self, when: float, act: Callable[[], None]) -> None:
        self._num_queued += 1
        heapq.heappush(self._queue, (max(when, self.now), self._num_queued, act))

    def later(self, process: Process, within: float, act: Callable[[], None]) -> None:
        self.at(self.now + self.rng.random() * within, lambda: process.run(act))

    def soon(self, process: Process, act: Callable[[], None]) -> None:
        self.at(self.now + self.delay(), lambda: process.run(act))

    def call(self, process: Process, act: Callable[[], None]) -> None:
        """A message: late, lost or doubled."""
        for _ in range(1 + self.happens(self.weather.double)):
            if not self.happens(self.weather.loss):
                self.soon(process, act)

    def ask(
        self,
        attempt: Attempt,
        question: Callable[[], list[SourceAction]],
        answer: Callable[[bool, float], list[SinkAction]],
    ) -> None:
        def at_source() -> None:
            actions = question()
            held = next(action.held for action in actions if isinstance(action, Answer))
            self.source.carry_out(actions)
            self.call(attempt.sink, lambda: attempt.carry_out(answer(held, self.now)))

        self.call(self.source, at_source)

    def maybe_stall(self, process: Process) -> float:
        if not self.happens(self.weather.stall):
            return 0.0
        length = self.rng.random() * 2 * LEASE_S

        def stall() -> None:
            process.stalled_until = self.now + length

        self.at(self.rng.random() * 2 * LEASE_S, stall)
        return length

    def run(self) -> None:
        while self._queue:
            if self.num_steps == self.kill_at_step:
                self._kill()
            self.now, _, act = heapq.heappop(self._queue)
            self.num_steps += 1
            assert self.num_steps < 20_000, "it does not end"
            act()

    def _kill(self) -> None:
        victim = self.source if self.kill == "source" else self.attempts[-1].sink if self.attempts else self.sinks[0]
        victim.is_dead = True
        for attempt in self.attempts:  # the kernel closes its sockets; now and then nobody hears of it
            if self.kill == "source" and self.happens(0.7):
                self.later(attempt.sink, LEASE_S, lambda a=attempt: a.give_up(WorkerLost("reset by peer")))
            if attempt.sink is victim and self.happens(0.7):
                attempt.source_learns_that_it_left()

    def check_end(self) -> None:
        """Everything has ended, in time, and every block is where it belongs."""
        slack = self.stall_s + 1e-6
        if not self.source.is_dead:
            assert not self.source.machine.is_live
            assert self.source.num_ends == 1
            assert self.source.owner == [None] * len(self.source.owner)
        assert len(self.commits) <= 1, f"committed twice: {self.commits}"
        for number, attempt in enumerate(self.attempts):
            if attempt.sink.is_dead:
                continue
            assert attempt.machine.is_over and attempt.ended_at is not None
            assert not attempt.is_quarantined and attempt.num_landing == 0
            started = attempt.machine._deadline - TIMEOUT_S  # pyright: ignore[reportPrivateUsage]
            assert attempt.ended_at <= started + TIMEOUT_S + slack
            committed = attempt.name in self.commits
            owners = {attempt} if committed else set[object]()
            assert {o for o in attempt.sink.owner if o is not None} == owners
            name = "commit" if committed else type(attempt.error).__name__
            self.outcomes[name] += 1
            self.outcomes["takeover"] += committed and number > 0


def simulate(seed: int, weather: Weather, *, kill: str = "", kill_at_step: int = -1) -> World:
    world = World(seed, weather, kill=kill, kill_at_step=kill_at_step)
    world.run()
    world.check_end()
    return world
