"""Runs cases in a process of their own: one that a case has ended, or that takes too long, is followed by another."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from .results import Limits, Result


class Worker(Protocol):
    def receive(self, seconds: float) -> Any:
        """Its next message. Raises EOFError if it has ended, TimeoutError if none comes in time."""
        ...

    def kill(self) -> None: ...


class Process:
    """Calls target(pipe, *arguments) in a process of its own."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def receive(self, seconds: float) -> Any:
        if not self._pipe.poll(max(seconds, 0.0)):
            raise TimeoutError
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def run(
    start: Callable[[Limits | None, int], Worker],
    seconds: float,
    seconds_each: float,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Limits | Result]:
    """start(limits if they are known, number of the first case): a worker that sends what runner.work does.

    Ends when the cases do, or after so many seconds: the case that then runs is told of as one that was cut off.
    """
    end = now() + seconds
    limits: Limits | None = None
    first, has_more = 0, True
    while has_more and now() < end:
        worker = start(limits, first)
        running: tuple[int, str, str, str] | None = None
        problem = "its process ended"
        has_more = False
        try:
            while True:
                match worker.receive(min(seconds_each, end - now())):
                    case Limits() as limits:
                        yield limits
                    case Result() as result:
                        running = None
                        has_more = bool(result.problem)  # perhaps the device is unusable: then the worker ends
                        yield result
                    case running:
                        first = running[0] + 1
        except EOFError:
            pass
        except TimeoutError:
            problem = "not done in time"
        finally:
            worker.kill()
        if running is not None:
            has_more = True
            yield Result(*running[1:], problem=problem)
