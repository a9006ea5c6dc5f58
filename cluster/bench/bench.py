"""Runs `diptych bench`: settings -> sessions -> calls -> figures. Knows neither torch nor Ray; any server will do.

find the model  ──>  make the sessions  ──>  warm up  ──>  load  ──>  report, JSON, plot
"""

import asyncio
import json
import resource
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...workers.common.errors import ConfigError, InvalidRequest, Unavailable
from ...workers.common.event_loop import new_event_loop
from ..tokens.tokenizer import Tokenizer
from ..traces.records import FORMATS
from .measure import Connection, Screen, connected, measure
from .plot import draw
from .report import Result, render, to_json
from .run import Load, Pace
from .settings import FROM_FILES, Arrival, BenchSettings, Work, check_output_files
from .text import TextSource
from .traces import sharegpt_sessions, trace_sessions
from .types import Session
from .workloads import Lengths, arrivals, multi_turn_sessions, random_sessions, shared_prefix_sessions

DEFAULT_CONCURRENCY = 8


def run(settings: BenchSettings, screen: Screen) -> bool:
    """Measure and report. Returns whether it was interrupted. Raises DiptychErrors."""
    check_output_files(settings.json_file, settings.plot_file)
    allow_many_sockets()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        result = runner.run(_measure(settings, screen))
    screen.out.print(render(result), soft_wrap=True)
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(to_json(result), indent=1) + "\n", encoding="utf-8")
    if settings.plot_file is not None:
        settings.plot_file.write_text(draw(result), encoding="utf-8")
    failure = next((reply.failure for reply in result.replies if reply.failure), None)
    if failure is not None and not result.summary.completed:
        raise Unavailable(f"no request succeeded; the first error was: {failure.kind}: {failure.message}")
    return result.is_interrupted


def make_sessions(work: Work, source: TextSource, tokenizer: Tokenizer | None) -> list[Session]:
    """Make the sessions. Raises ConfigError, WorkloadError."""
    if work.name in FROM_FILES:
        return _from_file(work, source, tokenizer)
    rng = np.random.default_rng(work.seed)
    if work.name == "multi-turn":
        return multi_turn_sessions(work.limits.num, work.turns, (work.inputs, work.outputs), source, rng)
    sessions = random_sessions(work.limits.num, work.inputs, work.outputs, source, rng)
    if work.name == "random":
        return sessions
    return shared_prefix_sessions(sessions, work.num_prefixes, work.prefix_tokens, source, rng)


def make_pace(arrival: Arrival, sessions: Sequence[Session], seed: int) -> Pace:
    starts, concurrency = None, arrival.concurrency or 0
    if arrival.rate is not None:
        starts = arrivals(len(sessions), arrival.rate, arrival.burstiness, np.random.default_rng((seed, 1)))
    elif all(session.at_s is not None for session in sessions):
        starts = [session.at_s or 0.0 for session in sessions]
    elif not concurrency:
        concurrency = DEFAULT_CONCURRENCY
    return Pace(starts, concurrency, arrival.think_s, arrival.max_s)


def _from_file(work: Work, source: TextSource, tokenizer: Tokenizer | None) -> list[Session]:
    if work.file is None:
        raise ConfigError(f"--workload {work.name} needs --file")
    if work.name in FORMATS:
        return trace_sessions(work.name, work.file, work.limits, source, work.seed)
    if tokenizer is None:
        raise ConfigError("--workload sharegpt needs --tokenizer, which counts the tokens of the recorded answers")
    return sharegpt_sessions(work.file, work.limits, tokenizer)


def allow_many_sockets() -> None:
    """Raise the limit of open files: each stream has a socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _measure(settings: BenchSettings, screen: Screen) -> Result:
    async with connected(settings.target) as connection:
        sessions = make_sessions(settings.work, connection.source, connection.tokenizer)
        await warm_up(connection, sessions[0], settings.work.seed, settings.num_warmup)
        pace = make_pace(settings.arrival, sessions, settings.work.seed)
        result = await measure(connection, sessions, pace, settings.levels, screen)
    shown = dict(settings.shown) | {"model": connection.asking.model, "api": settings.target.api}
    return replace(result, settings=shown)


async def warm_up(connection: Connection, first: Session, seed: int, num: int) -> None:
    """Send `num` requests one after the other. A failure ends the measurement before it begins."""
    load = Load(connection.endpoint, connection.asking, lambda _: None)
    for session in _warm_sessions(first, connection.source, seed, num):
        await load.run((session,), Pace(None, 1))
        if failure := load.replies[-1].failure:
            message = f"the first request failed: {failure.kind}: {failure.message}"
            raise InvalidRequest(message) if failure.is_refused else Unavailable(message)


def _warm_sessions(first: Session, source: TextSource, seed: int, num: int) -> list[Session]:
    """Sessions to warm up with: as long as the first turn, of other tokens, so that no later prompt is cached."""
    turn = first.turns[0]
    lengths = Lengths(turn.num_tokens, turn.num_tokens), Lengths(turn.max_tokens, turn.max_tokens)
    return random_sessions(num, *lengths, source, np.random.default_rng((seed, 2)))
