"""Measures layouts by simulation, in as many processes as there are cores. The order and the figures of the results do
not depend on their number."""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from types import TracebackType
from typing import Self

from ...workers.common.errors import Unavailable
from ...workers.costs.step_cost import StepWork
from ...workers.models.families.spec import ModelSpec
from ..common.config_file import build
from ..simulate.build import Hardware, simulate
from ..simulate.figures import SimulationFigures
from ..simulate.load import SimulatedRequest, at_rate
from ..simulate.roofline import RooflineTimer
from .layouts import Layout, PlannedLevel, WorkerMemory, settings_of
from .search import LayoutFinding, Measured, Question, SearchGoal, answer

TYPICAL_BATCH = 64  # decodes of a step, for the rate to begin with


@dataclass(frozen=True, slots=True)
class Problem:
    """Model, hardware, load and service level of a plan. `load`: in order of time."""

    model: str
    memory: WorkerMemory
    hardware: Hardware
    load: tuple[SimulatedRequest, ...]
    level: PlannedLevel

    @property
    def mean_tokens(self) -> tuple[float, float]:
        """Mean length of a prompt and of an answer."""
        turns = [turn for first in self.load for turn in turns_of(first)]
        return sum(turn.num_input for turn in turns) / len(turns), sum(turn.num_output for turn in turns) / len(turns)

    @property
    def session_tokens(self) -> float:
        """Mean of the tokens that a session is answered, over all its turns."""
        return sum(turn.num_output for first in self.load for turn in turns_of(first)) / len(self.load)


def turns_of(first: SimulatedRequest) -> Iterator[SimulatedRequest]:
    """Requests of a session."""
    turn: SimulatedRequest | None = first
    while turn is not None:
        yield turn
        turn = turn.next_turn


def measure(problem: Problem, layout: Layout, rate: float, num: int) -> Measured:
    """Simulate a layout with the first `num` requests, or sessions, at a rate. Raises ConfigError."""
    level = problem.level
    config = build(settings_of(layout, problem.model, problem.memory, level))
    load = at_rate(problem.load[:num], rate)
    figures = simulate(config, problem.hardware, load, {"ttft": level.ttft_s, "tpot": level.tpot_s})
    return Measured(
        rate=rate,
        good=round(figures.good * figures.num_requests),
        sent=figures.num_requests,
        ttft_ms=_percentiles(figures, "ttft"),
        tpot_ms=_percentiles(figures, "tpot"),
        handed_off=figures.handed_off,
        is_burst=figures.is_burst,
    )


def _percentiles(figures: SimulationFigures, metric: str) -> tuple[float, float]:
    found = figures.spreads[metric].percentiles
    return found[50], found[99]


def goal_of(problem: Problem, spec: ModelSpec, layouts: Sequence[Layout]) -> SearchGoal:
    """Rates to begin a search with: one request at a time, and what the GPUs compute by the roofline."""
    num_input, num_output = problem.mean_tokens
    smallest = min((pool for layout in layouts for pool in layout.pools), key=lambda pool: pool.ranks.tensor_parallel)
    how, _ = problem.memory.plan(spec, smallest.ranks.tensor_parallel)
    timer = RooflineTimer.of(spec, how, problem.memory.gpu, problem.hardware.reached, problem.memory.layouts)
    prefill_s = timer.seconds(StepWork().with_chunk(0, round(num_input)))
    context = round(TYPICAL_BATCH * (num_input + num_output / 2))
    decode_s = num_output * timer.seconds(StepWork(TYPICAL_BATCH, context)) / TYPICAL_BATCH
    num_workers = layouts[0].num_gpus / smallest.ranks.tensor_parallel
    return SearchGoal(
        num_requests=len(problem.load),
        level=problem.level,
        idle_rate=1 / (problem.level.ttft_s + num_output * problem.level.tpot_s),
        first_rate=num_workers / (prefill_s + decode_s),
    )


class Simulations:
    """Answers questions about a problem, with `num_processes`. One: in this process."""

    def __init__(self, problem: Problem, num_processes: int) -> None:
        self._problem = problem
        self._pool: ProcessPoolExecutor | None = None
        if num_processes > 1:
            self._pool = ProcessPoolExecutor(num_processes, get_context("spawn"), _end_when_told)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, questions: Sequence[Question]) -> Iterator[LayoutFinding]:
        """Findings in the order of the questions. Raises ConfigError, and Unavailable where a process was killed."""
        answers = partial(_answer, self._problem)
        if self._pool is None:
            yield from map(answers, questions)
            return
        try:
            yield from self._pool.map(answers, questions)
        except BrokenProcessPool as e:
            raise Unavailable(
                "a process that simulated was killed, perhaps for want of memory: use fewer --jobs or --num-requests"
            ) from e


def _answer(problem: Problem, question: Question) -> LayoutFinding:
    return answer(question, partial(measure, problem), problem.level.share)


def _end_when_told() -> None:
    """End without a traceback: Ctrl-C reaches every process of the terminal. And at SIGTERM, which the parent may
    ignore: by it the pool ends those that are left when one was killed, which may wait for a lock that it held."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def num_cores() -> int:
    return os.cpu_count() or 1
