"""Encodes prompts in processes (prompt_process.py), so that the router's event loop goes on meanwhile.

    PromptEncoder   two processes, so that small tasks do not wait for large ones; short texts need none
    PromptProcess   one such process: started with its first task, and again after it was ended

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
from array import array
from collections.abc import Callable
from dataclasses import dataclass, fields

from ...workers.common.errors import CheckpointError, InvalidRequest, Overloaded, Unavailable, from_wire
from .prompt_encoding import ChatPrompt, Encoded
from .prompt_frames import BODY, CHAT, SIZES, TEXT, Head, to_frame
from .tokenizer import Tokenizer

MAX_INLINE_CHARS = 16_384  # of text that the front door encodes itself: about 5 ms
MAX_SMALL_BYTES = 65_536  # of a task for the process of small tasks
SLICE = 2048  # prompts and token ids that are read at once


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of a task in processor time, time and memory."""

    cpu_s: float = 4.0  # processor time
    cpu_s_per_mib: float = 1.0  # more for each MiB of the task
    wall_factor: float = 5.0  # times its processor time: on a loaded machine a process waits for a core
    max_wait_s: float = 30.0  # behind other tasks
    max_memory_bytes: int = 1 << 30  # more than the process holds when it is ready
    start_s: float = 60.0


class PromptEncoder:
    """Encoder of prompts: texts and chats. Use and `close` it on one event loop."""

    def __init__(self, tokenizer: Tokenizer, limits: ProcessLimits) -> None:
        self._tokenizer = tokenizer
        self._small = PromptProcess(tokenizer.state, limits)
        self._large = PromptProcess(tokenizer.state, limits)

    async def start(self) -> None:
        """Start the process for chats, so that the first chat does not wait for it."""
        if self._tokenizer.has_chat_template:
            await self._small.start()

    async def close(self) -> None:
        await asyncio.gather(self._small.close(), self._large.close())

    async def encode_text(self, text: str, max_context_tokens: int) -> tuple[int, ...]:
        """Raises InvalidRequest, PromptTooLong, Overloaded."""
        _, [prompt] = await self._ask({"kind": TEXT}, text.encode(errors="replace"), max_context_tokens)
        return prompt.token_ids

    async def encode_chat(self, chat: ChatPrompt, max_context_tokens: int) -> tuple[int, ...]:
        """Raises InvalidRequest, PromptTooLong, Overloaded."""
        body = json.dumps({field.name: getattr(chat, field.name) for field in fields(chat)}).encode()
        _, [prompt] = await self._ask({"kind": CHAT}, body, max_context_tokens)
        return prompt.token_ids

    async def read_body(
        self, kind: str, body: bytes, max_context_tokens: int, max_prompts: int
    ) -> tuple[bytes, list[Encoded]]:
        """Read a body: see front/openai/calls.py. Raises InvalidRequest, PromptTooLong, Overloaded."""
        return await self._ask({"kind": BODY, "body": kind, "max_prompts": max_prompts}, body, max_context_tokens)

    async def _ask(self, task: Head, body: bytes, max_context_tokens: int) -> tuple[bytes, list[Encoded]]:
        process = self._small if len(body) <= MAX_SMALL_BYTES else self._large
        head, found = await process.ask(task | {"max_context_tokens": max_context_tokens}, body)
        prompts: list[Encoded] = []
        num_read, start = 0, head["call"]
        for num_ids, num_text in head["prompts"]:
            ids, start = array("I", found[start : start + num_ids]), start + num_ids
            text = None if num_text < 0 else found[start : start + num_text].decode()
            start += max(num_text, 0)
            prompts.append(Encoded(tuple(ids), text))
            num_read += 1 + num_ids
            if num_read >= SLICE:  # a million numbers take long
                num_read = 0
                await asyncio.sleep(0)
        return found[: head["call"]], prompts


class PromptProcess:
    """`state`: of the tokenizer of the process."""

    def __init__(self, state: Callable[[], bytes], limits: ProcessLimits) -> None:
        self._state = state
        self._limits = limits
        self._turn = asyncio.Lock()
        self._link: _RunningProcess | None = None
        self._under_way: asyncio.Task[tuple[Head, bytes]] | None = None
        self._is_closed = False

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
            async with asyncio.timeout(self._limits.max_wait_s):
                await self._turn.acquire()
        except TimeoutError as e:
            raise Overloaded("earlier prompts take too long to tokenise: try again later") from e
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
        link, limits = await self._linked(), self._limits
        cpu_s = limits.cpu_s + limits.cpu_s_per_mib * len(body) / (1 << 20)
        try:
            async with asyncio.timeout(limits.wall_factor * cpu_s):
                return await link.exchange(task | {"cpu_s": cpu_s}, body)
        except (TimeoutError, EOFError, OSError) as e:
            await self._end()
            raise InvalidRequest(
                f"tokenising the request needs more than {cpu_s:.3g} s of processor time or "
                f"{limits.max_memory_bytes >> 20} MiB. Send less",
                param="messages" if task["kind"] == CHAT else None,
            ) from e
        except asyncio.CancelledError:
            await self._end()
            raise

    async def _linked(self) -> "_RunningProcess":
        if self._link is not None and self._link.process.poll() is not None:
            await self._end()  # it was ended between two tasks
        if self._link is None:
            state = await asyncio.to_thread(self._state)
            limits = {"cpu_s": self._limits.cpu_s, "max_memory_bytes": self._limits.max_memory_bytes}
            self._link = await _RunningProcess.open()
            try:
                async with asyncio.timeout(self._limits.start_s):
                    head, _ = await self._link.exchange(limits, state)
                _checked(head)
            except (TimeoutError, EOFError, OSError) as e:
                await self._end()
                raise CheckpointError(
                    "the process that tokenises prompts did not start: the checkpoint's chat template may need too "
                    "much time or memory to compile. See the router's log, or remove the template"
                ) from e
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
    async def open(cls) -> "_RunningProcess":
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "diptych.cluster.front.openai.prompt_process"],
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
