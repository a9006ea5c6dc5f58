"""Connects to a server, and measures it under one load, with its progress shown."""

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..preflight.checks import resolve_model
from ..tokens.tokenizer import Tokenizer
from .grpc import GrpcEndpoint
from .openai import Asking, OpenAIEndpoint
from .report import Result
from .run import Load, Pace, ServerEndpoint
from .settings import Target
from .stats import summarise
from .text import TextSource, TokenText, WordText
from .types import Reply, Session

FIND_S = 30.0  # for the server to name its model
REFRESHES = 4  # of the progress bar in a second: drawing it must not disturb the measurement
LINE_S = 5.0  # between two lines of progress without a terminal

OnReply = Callable[[Reply], None]


@dataclass(frozen=True, slots=True)
class Connection:
    """Server that was found, and the source of prompts for it."""

    endpoint: ServerEndpoint
    asking: Asking
    source: TextSource
    tokenizer: Tokenizer | None


@dataclass(frozen=True, slots=True)
class Screen:
    """Places to show progress: a bar on `out` where it is a terminal, else lines on `err`. `line_s`: between them."""

    out: Console
    err: Console
    line_s: float = LINE_S

    def log(self, line: str) -> None:
        self.err.print(line, soft_wrap=True, markup=False, highlight=False)


@asynccontextmanager
async def connected(target: Target) -> AsyncGenerator[Connection]:
    """Raises ConfigError, Unavailable, Unauthenticated, UnknownModel."""
    tokenizer = Tokenizer.load(Path(resolve_model(target.tokenizer))) if target.tokenizer else None
    source = WordText(tokenizer) if tokenizer else TokenText(target.vocab_size)
    endpoint = _endpoint(target)
    try:
        model = await endpoint.find_model(target.model, FIND_S)
        yield Connection(
            endpoint, Asking(model, target.api == "chat", target.timeout_s, target.more), source, tokenizer
        )
    finally:
        await endpoint.close()


def _endpoint(target: Target) -> ServerEndpoint:
    if target.is_grpc:
        return GrpcEndpoint(target.url.netloc, target.api_key, tls=target.url.scheme == "grpcs")
    return OpenAIEndpoint(target.url, target.api_key)


async def measure(
    connection: Connection, sessions: Sequence[Session], pace: Pace, levels: Mapping[str, float], screen: Screen
) -> Result:
    """Send the sessions at their pace. Ctrl-C ends the load; then the result is of the requests that had ended."""
    async with _progress(sum(len(session.turns) for session in sessions), screen) as on_reply:
        load = Load(connection.endpoint, connection.asking, on_reply)
        date, cpu, began = datetime.now(UTC).isoformat(timespec="seconds"), time.process_time(), time.perf_counter()
        is_interrupted = await _until_interrupted(load.run(sessions, pace))
        duration_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return Result(
        settings={},
        replies=load.replies,
        summary=summarise(load.replies, duration_s, levels),
        levels=levels,
        began_at=began,
        client_cpu_s=cpu_s,
        date=date,
        is_interrupted=is_interrupted,
    )


async def _until_interrupted(work: Coroutine[Any, Any, None]) -> bool:
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


@dataclass(slots=True)
class Tally:
    """Counts of the replies so far."""

    total: int
    ended: int = 0
    failed: int = 0
    num_output: int = 0

    def add(self, reply: Reply) -> None:
        self.ended += 1
        self.failed += reply.failure is not None
        self.num_output += reply.num_output

    def line(self, elapsed_s: float) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{elapsed_s:.0f} s: {self.ended} of {self.total} requests{failed}, {self.num_output} tokens"


@asynccontextmanager
async def _progress(total: int, screen: Screen) -> AsyncGenerator[OnReply]:
    """A bar on a terminal; elsewhere a line every few seconds."""
    tally = Tally(total)
    if not screen.out.is_terminal:
        writer = asyncio.create_task(_write_lines(tally, screen))
        try:
            yield tally.add
        finally:
            writer.cancel()
        return
    with _bar(screen.out) as progress:
        bar = progress.add_task("", total=total, tokens=0)

        def on_reply(reply: Reply) -> None:
            tally.add(reply)
            progress.update(bar, advance=1, tokens=tally.num_output)

        yield on_reply


async def _write_lines(tally: Tally, screen: Screen) -> None:
    began = time.perf_counter()
    while True:
        await asyncio.sleep(screen.line_s)
        screen.log(tally.line(time.perf_counter() - began))


def _bar(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=REFRESHES,
    )
