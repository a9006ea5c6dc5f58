"""The router's side of prompt_process.py: prompts in, token ids out, without holding up the event loop.

    PromptEncoder   two processes, so that small tasks do not wait for large ones; short texts need none
    PromptProcess   one such process: started when first asked, and again after it was ended

A task that takes more than its limits ends its process, and is refused by name; other tasks wait for the next process.
A task whose caller no longer waits runs to its end.
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
MAX_SMALL_BYTES = 65_536  # of a task for the process that answers small ones
SLICE = 2048  # prompts and token ids that are read in one go


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """What a task may take."""

    cpu_s: float = 4.0  # processor time
    cpu_s_per_mib: float = 1.0  # of the task; more than that for each
    wall_factor: float = 5.0  # as long as its processor time: a loaded machine gives a process less than it asks for
    max_wait_s: float = 30.0  # behind other tasks
    max_memory_bytes: int = 1 << 30  # beyond what the process holds once it is ready
    start_s: float = 60.0


class PromptEncoder:
    """Use it on one event loop; `close` it there."""

    def __init__(self, tokenizer: Tokenizer, limits: ProcessLimits) -> None:
        self._tokenizer = tokenizer
        self._small = PromptProcess(tokenizer.state, limits)
        self._large = PromptProcess(tokenizer.state, limits)

    async def start(self) -> None:
        """Start the process that chats need, so that the first does not wait for it."""
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
        """See openai_calls.read_call. Raises InvalidRequest, PromptTooLong, Overloaded."""
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
            if num_read >= SLICE:  # a million numbers take a while
                num_read = 0
                await asyncio.sleep(0)
        return found[: head["call"]], prompts


class PromptProcess:
    """`state`: of the tokenizer that the process shall have."""

    def __init__(self, state: Callable[[], bytes], limits: ProcessLimits) -> None:
        self._state = state
        self._limits = limits
        self._turn = asyncio.Lock()
        self._link: _Link | None = None
        self._under_way: asyncio.Task[tuple[Head, bytes]] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """None: it does not run."""
        return self._link.process.pid if self._link else None

    async def start(self) -> None:
        async with self._turn:
            await self._linked()

    async def ask(self, task: Head, body: bytes) -> tuple[Head, bytes]:
        """Its answer's head and body. Raises the error that it answers with; InvalidRequest where it took too much;
        Overloaded where its turn does not come; Unavailable once it is closed."""
        try:
            async with asyncio.timeout(self._limits.max_wait_s):
                await self._turn.acquire()
        except TimeoutError as e:
            raise Overloaded("the prompts before this one take too long to read: try again later") from e
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
        """End the process, and start none again. Idempotent."""
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
                f"the request takes too much to read: more than {cpu_s:.3g} s of processor time, or "
                f"{limits.max_memory_bytes >> 20} MiB. Send less",
                param="messages" if task["kind"] == CHAT else None,
            ) from e
        except asyncio.CancelledError:
            await self._end()
            raise

    async def _linked(self) -> "_Link":
        if self._link is not None and self._link.process.poll() is not None:
            await self._end()  # it was ended between two tasks
        if self._link is None:
            state = await asyncio.to_thread(self._state)
            limits = {"cpu_s": self._limits.cpu_s, "max_memory_bytes": self._limits.max_memory_bytes}
            self._link = await _Link.open()
            try:
                async with asyncio.timeout(self._limits.start_s):
                    head, _ = await self._link.exchange(limits, state)
                _checked(head)
            except (TimeoutError, EOFError, OSError) as e:
                await self._end()
                raise CheckpointError(
                    "the process that reads prompts did not start: the checkpoint's chat template may take too much to "
                    "compile. See the router's log, or remove the template"
                ) from e
            except (CheckpointError, asyncio.CancelledError):
                await self._end()
                raise
        return self._link

    async def _end(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()


class _Link:
    """A running process and the socket to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls) -> "_Link":
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
        # The kernel may take a while to free the memory of a process.
        await asyncio.to_thread(self.process.wait)


def _checked(head: Head) -> Head:
    """Raises the error that the head tells of."""
    if "error" in head:
        error = from_wire(head["error"], head["message"])
        error.param = head["param"]
        raise error
    return head


def _look(task: "asyncio.Task[tuple[Head, bytes]]") -> None:
    """Nobody may be left to hear its error."""
    if not task.cancelled():
        task.exception()
