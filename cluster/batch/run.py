"""Runs a batch: so many requests at once, each result written as soon as it is there."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ...workers.common.errors import ConfigError, DiptychError
from .lines import BatchLine, batch_lines, checked_ids
from .results import ResultFiles
from .sender import SendConfig, Sender

LINE_S = 10.0  # between two lines of progress


@dataclass(frozen=True, slots=True)
class BatchFiles:
    source: Path
    output: Path
    failures: Path


@dataclass(slots=True)
class BatchTally:
    """Counts of a batch. `num_before`: answers that the output already held."""

    num_requests: int
    num_before: int
    num_answers: int = 0
    num_failures: int = 0

    def line(self, elapsed_s: float) -> str:
        ended = self.num_before + self.num_answers + self.num_failures
        failed = f", {self.num_failures} failed" if self.num_failures else ""
        return f"{elapsed_s:.0f} s: {ended} of {self.num_requests} requests{failed}"


def run_batch(files: BatchFiles, config: SendConfig, console: Console, *, resume: bool) -> BatchTally:
    """Raises ConfigError, WorkloadError, Unavailable, Unauthenticated."""
    try:
        source = files.source.open("rb")
    except OSError as e:
        raise ConfigError(f"cannot read {files.source}: {e.strerror}") from e
    with source:
        ids = checked_ids(source, str(files.source))
        with ResultFiles(files.output, files.failures, resume=resume) as results:
            if foreign := results.done.difference(ids):
                raise ConfigError(
                    f"{files.output} holds the answer to {min(foreign)!r}, which {files.source} does not ask: it is of "
                    "another batch. Choose another --output"
                )
            tally = BatchTally(len(ids), len(results.done))
            lines = (line for line in batch_lines(source, str(files.source)) if line.custom_id not in results.done)
            asyncio.run(_run(lines, config, results, tally, console))
    return tally


async def _run(
    lines: Iterator[BatchLine], config: SendConfig, results: ResultFiles, tally: BatchTally, console: Console
) -> None:
    sender = Sender(config)

    async def send_lines() -> None:
        for line in lines:  # shared: each line is taken once
            outcome = await sender.send(line)
            results.write(outcome)
            tally.num_answers += outcome.is_answer
            tally.num_failures += not outcome.is_answer

    try:
        await sender.check()
        async with _progress(tally, console), asyncio.TaskGroup() as group:
            for _ in range(min(config.concurrency, tally.num_requests)):
                group.create_task(send_lines())
    except* DiptychError as errors:
        raise _first(errors) from None
    finally:
        await sender.close()


def _first(errors: BaseExceptionGroup[DiptychError]) -> DiptychError:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, DiptychError)
    return found


@asynccontextmanager
async def _progress(tally: BatchTally, console: Console) -> AsyncGenerator[None]:
    """A line every few seconds, and at the end."""
    began = time.monotonic()

    def show() -> None:
        console.print(tally.line(time.monotonic() - began), soft_wrap=True, markup=False, highlight=False)

    async def repeat() -> None:
        while True:
            await asyncio.sleep(LINE_S)
            show()

    writer = asyncio.create_task(repeat())
    try:
        yield
    finally:
        writer.cancel()
        show()
