"""Process that computes tasks of requests for a router, one after the other, within limits.

    TaskProcess   started with its first task, and again after it was ended

A task that exceeds its limits ends its process, and is refused; other tasks wait for the next process. A task whose
caller no longer waits runs to its end.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from ...workers.common.errors import CheckpointError, DiptychError, InvalidRequest, Overloaded, Unavailable, from_wire
from .prompt_frames import SIZES, Head, to_frame


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of a task in processor time, time and memory."""

    cpu_s: float = 4.0  # processor time
    cpu_s_per_mib: float = 1.0  # more for each MiB of the task
    wall_factor: float = 5.0  # times its processor time: on a loaded machine a process waits for a core
    max_wait_s: float = 30.0  # behind other tasks
    max_memory_bytes: int = 1 << 30  # more than the process holds when it is ready
    start_s: float = 60.0


class TaskProcess(ABC):
    """Process that runs a module, which is sent `state` at its start. A subclass names the errors."""

    def __init__(self, module: str, state: Callable[[], bytes], limits: ProcessLimits) -> None:
        self._module, self._state = module, state
        self.limits = limits
        self._turn = asyncio.Lock()
        self._link: _RunningProcess | None = None
        self._under_way: asyncio.Task[tuple[Head, bytes]] | None = None
        self._is_closed = False

    @abstractmethod
    def exceeded(self, task: Head, cpu_s: float) -> InvalidRequest:
        """Make the error of a task that exceeded its limits."""

    @abstractmethod
    def not_started(self) -> DiptychError:
        """Make the error of a process that did not start within its limits."""

    @property
    def pid(self) -> int | None:
        """Id of the process; None: it does not run."""
        return self._link.process.pid if self._link else None

    async def start(self) -> None:
        async with self._turn:
            await self._linked()

    async def ask(self, task: Head, body: bytes) -> tuple[Head, bytes]:
        """Head and body of the answer to a task. Raises the error of the answer; InvalidRequest where the task exceeded
        its limits; Overloaded where it waited too long; Unavailable after `close`."""
        try:
            async with asyncio.timeout(self.limits.max_wait_s):
                await self._turn.acquire()
        except TimeoutError as e:
            raise Overloaded("earlier requests take too long to read: try again later") from e
        try:
            if self._under_way is not None and not self._under_way.done():
                await asyncio.wait((self._under_way,))
            if self._is_closed:
                raise Unavailable("the router is ending: send the request again")
            self._under_way = asyncio.create_task(self._exchange(task, body))
            self._under_way.add_done_callback(_look)
            head, found = await asyncio.shield(self._under_way)
        finally:
            self._turn.release()
        return _checked(head), found

    async def close(self) -> None:
        """End the process for good. Idempotent."""
        self._is_closed = True
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.wait((self._under_way,))
        await self._end()

    async def _exchange(self, task: Head, body: bytes) -> tuple[Head, bytes]:
        link, limits = await self._linked(), self.limits
        cpu_s = limits.cpu_s + limits.cpu_s_per_mib * len(body) / (1 << 20)
        try:
            async with asyncio.timeout(limits.wall_factor * cpu_s):
                return await link.exchange(task | {"cpu_s": cpu_s}, body)
        except (TimeoutError, EOFError, OSError) as e:
            await self._end()
            raise self.exceeded(task, cpu_s) from e
        except asyncio.CancelledError:
            await self._end()
            raise

    async def _linked(self) -> "_RunningProcess":
        if self._link is not None and self._link.process.poll() is not None:
            await self._end()  # it was ended between two tasks
        if self._link is None:
            state = await asyncio.to_thread(self._state)
            limits = {"cpu_s": self.limits.cpu_s, "max_memory_bytes": self.limits.max_memory_bytes}
            self._link = await _RunningProcess.open(self._module)
            try:
                async with asyncio.timeout(self.limits.start_s):
                    head, _ = await self._link.exchange(limits, state)
                _checked(head)
            except (TimeoutError, EOFError, OSError) as e:
                await self._end()
                raise self.not_started() from e
            except (CheckpointError, asyncio.CancelledError):
                await self._end()
                raise
        return self._link

    async def _end(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()


class _RunningProcess:
    """Running process and the socket to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, module: str) -> "_RunningProcess":
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer)

    async def exchange(self, head: Head, body: bytes) -> tuple[Head, bytes]:
        """Raises EOFError, OSError where the process ends."""
        self._writer.writelines(to_frame(head, body))
        await self._writer.drain()
        num_head, num_body = SIZES.unpack(await self._reader.readexactly(SIZES.size))
        answer: Head = json.loads(await self._reader.readexactly(num_head))
        return answer, await self._reader.readexactly(num_body)

    async def close(self) -> None:
        self.process.kill()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        # The kernel may take long to free the memory of a process.
        await asyncio.to_thread(self.process.wait)


def _checked(head: Head) -> Head:
    """Raise the error that the head describes, if any."""
    if "error" in head:
        error = from_wire(head["error"], head["message"])
        error.param = head["param"]
        raise error
    return head


def _look(task: "asyncio.Task[tuple[Head, bytes]]") -> None:
    """Retrieve a task's error, for which no caller may wait any more."""
    if not task.cancelled():
        task.exception()
