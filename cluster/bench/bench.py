"""Runs `diptych bench`: settings -> sessions -> calls -> figures. Knows neither torch nor Ray; any server will do.

find the model  ──>  make the sessions  ──>  warm up  ──>  load  ──>  report, JSON, plot
"""

import asyncio
import json
import resource
import signal
import time
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ...workers.common.errors import ConfigError, InvalidRequest, Unavailable
from ...workers.common.event_loop import new_event_loop
from ..preflight.checks import resolve_model
from ..tokens.tokenizer import Tokenizer
from .grpc import GrpcEndpoint
from .openai import Asking, OpenAIEndpoint
from .plot import draw
from .report import Result, render, to_json
from .run import Load, Pace, ServerEndpoint
from .settings import FROM_FILES, Arrival, BenchSettings, Target, Work, check_output_files
from .stats import summarise
from .text import TextSource, TokenText, WordText
from .traces import azure_sessions, mooncake_sessions, sharegpt_sessions
from .types import Reply, Session
from .workloads import Lengths, arrivals, multi_turn_sessions, random_sessions, shared_prefix_sessions

DEFAULT_CONCURRENCY = 8
FIND_S = 30.0  # for the server to name its model
REFRESHES = 4  # of the progress bar in a second: drawing it must not disturb the measurement


def run(settings: BenchSettings, console: Console) -> bool:
    """Measure and report. Returns whether it was interrupted. Raises DiptychErrors."""
    check_output_files(settings)
    _allow_many_sockets()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        result = runner.run(_measure(settings, console))
    console.print(render(result), soft_wrap=True)
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(to_json(result), indent=1) + "\n", encoding="utf-8")
    if settings.plot_file is not None:
        settings.plot_file.write_text(draw(result), encoding="utf-8")
    failure = next((reply.failure for reply in result.replies if reply.failure), None)
    if failure is not None and not result.summary.completed:
        raise Unavailable(f"no request succeeded; the first said: {failure.kind}: {failure.message}")
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
    if work.name == "azure":
        return azure_sessions(work.file, work.limits, source, np.random.default_rng(work.seed))
    if work.name == "mooncake":
        return mooncake_sessions(work.file, work.limits, source, work.seed)
    if tokenizer is None:
        raise ConfigError("--workload sharegpt needs --tokenizer: the recorded answers are counted in its tokens")
    return sharegpt_sessions(work.file, work.limits, tokenizer)


def _allow_many_sockets() -> None:
    """Raise the limit of open files: each stream has a socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _measure(settings: BenchSettings, console: Console) -> Result:
    target, work = settings.target, settings.work
    tokenizer = Tokenizer.load(Path(resolve_model(target.tokenizer))) if target.tokenizer else None
    source = WordText(tokenizer) if tokenizer else TokenText(target.vocab_size)
    endpoint = _endpoint(target)
    try:
        model = await endpoint.find_model(target.model, FIND_S)
        asking = Asking(model, target.api == "chat", target.timeout_s, target.more)
        sessions = make_sessions(work, source, tokenizer)
        if settings.num_warmup:
            await _warm_up(endpoint, asking, _warm_sessions(sessions[0], source, work.seed, settings.num_warmup))
        return await _load(settings, endpoint, asking, sessions, console)
    finally:
        await endpoint.close()


def _endpoint(target: Target) -> ServerEndpoint:
    if target.is_grpc:
        return GrpcEndpoint(target.url.netloc, target.api_key, tls=target.url.scheme == "grpcs")
    return OpenAIEndpoint(target.url, target.api_key)


def _warm_sessions(first: Session, source: TextSource, seed: int, num: int) -> list[Session]:
    """Sessions to warm up with: as long as the first turn, of other tokens, so that no later prompt is cached."""
    turn = first.turns[0]
    lengths = Lengths(turn.num_tokens, turn.num_tokens), Lengths(turn.max_tokens, turn.max_tokens)
    return random_sessions(num, *lengths, source, np.random.default_rng((seed, 2)))


async def _warm_up(endpoint: ServerEndpoint, asking: Asking, sessions: Sequence[Session]) -> None:
    """Run them one after the other. A failure ends the measurement before it begins."""
    load = Load(endpoint, asking, lambda _: None)
    for session in sessions:
        await load.run((session,), Pace(None, 1))
        if failure := load.replies[-1].failure:
            message = f"the first request failed: {failure.kind}: {failure.message}"
            is_ours = failure.kind.startswith("HTTP 4") and not failure.kind.startswith("HTTP 429")
            raise InvalidRequest(message) if is_ours else Unavailable(message)


async def _load(
    settings: BenchSettings, endpoint: ServerEndpoint, asking: Asking, sessions: Sequence[Session], console: Console
) -> Result:
    with _progress(console) as progress:
        bar = progress.add_task("", total=sum(len(session.turns) for session in sessions), tokens=0)
        num_output = 0

        def on_reply(reply: Reply) -> None:
            nonlocal num_output
            num_output += reply.num_output
            progress.update(bar, advance=1, tokens=num_output)

        load = Load(endpoint, asking, on_reply)
        pace = make_pace(settings.arrival, sessions, settings.work.seed)
        date, cpu, began = datetime.now(UTC).isoformat(timespec="seconds"), time.process_time(), time.perf_counter()
        is_interrupted = await _until_interrupted(load.run(sessions, pace))
        duration_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return Result(
        settings=dict(settings.shown) | {"model": asking.model, "api": settings.target.api},
        replies=load.replies,
        summary=summarise(load.replies, duration_s, settings.levels),
        levels=settings.levels,
        began_at=began,
        client_cpu_s=cpu_s,
        date=date,
        is_interrupted=is_interrupted,
    )


async def _until_interrupted(work: Coroutine[None, None, None]) -> bool:
    """Run to the end or to Ctrl-C. Returns whether it was Ctrl-C."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(work)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await asyncio.wait((task,))
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        task.cancel()
    if task.cancelled():
        return True
    task.result()
    return False


def _progress(console: Console) -> Progress:
    """Progress bar on a terminal; nothing elsewhere."""
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=REFRESHES,
        disable=not console.is_terminal,
    )
