"""Encodes prompts in processes (prompt_process.py), so that the router's event loop goes on meanwhile.

Two processes, so that small tasks do not wait for large ones; short texts need none. See task_process.py.
"""

import asyncio
import json
from array import array
from dataclasses import fields

from ...workers.common.errors import CheckpointError, InvalidRequest
from ...workers.common.request import MAX_PREDICTION_TOKENS, check_prediction_length
from .prompt_encoding import ChatPrompt, Encoded, WrittenChat, check_prediction_chars, encode_prediction
from .prompt_frames import BODY, CHAT, TEXT, Head
from .task_process import ProcessLimits, TaskProcess
from .tokenizer import Tokenizer

MAX_INLINE_CHARS = 16_384  # of text that the front door encodes itself: about 5 ms
MAX_SMALL_BYTES = 65_536  # of a task for the process of small tasks
SLICE = 2048  # prompts and token ids that are read at once
_MODULE = "diptych.cluster.front.prompts.prompt_process"


class PromptEncoder:
    """Encoder of prompts: texts and chats. Use and `close` it on one event loop."""

    def __init__(self, tokenizer: Tokenizer, limits: ProcessLimits) -> None:
        self._tokenizer = tokenizer
        self._small, self._large = (_PromptProcess(_MODULE, tokenizer.state, limits) for _ in range(2))

    async def start(self) -> None:
        """Start the process for chats, so that the first chat does not wait for it."""
        if self._tokenizer.has_chat_template:
            await self._small.start()

    async def close(self) -> None:
        await asyncio.gather(self._small.close(), self._large.close())

    async def encode_text(self, text: str, max_context_tokens: int, *, special: bool = True) -> tuple[int, ...]:
        """Raises InvalidRequest, PromptTooLong, Overloaded."""
        _, [prompt] = await self._ask(
            {"kind": TEXT, "special": special}, text.encode(errors="replace"), max_context_tokens
        )
        return prompt.token_ids

    async def encode_prediction(self, text: str) -> tuple[int, ...]:
        """Token ids of what an answer is expected to be like. Raises InvalidRequest, Overloaded."""
        if len(text) <= MAX_INLINE_CHARS:
            return encode_prediction(self._tokenizer, text)
        check_prediction_chars(self._tokenizer, text)
        token_ids = await self.encode_text(text, MAX_PREDICTION_TOKENS, special=False)
        check_prediction_length(len(token_ids))
        return token_ids

    async def encode_chat(self, chat: ChatPrompt, max_context_tokens: int) -> tuple[int, ...]:
        """Raises InvalidRequest, PromptTooLong, Overloaded."""
        written = WrittenChat(json.dumps({field.name: getattr(chat, field.name) for field in fields(chat)}))
        return await self.encode_written(written, max_context_tokens)

    async def encode_written(self, chat: WrittenChat, max_context_tokens: int) -> tuple[int, ...]:
        """Raises InvalidRequest, PromptTooLong, Overloaded."""
        _, [prompt] = await self._ask({"kind": CHAT}, chat.json.encode(), max_context_tokens)
        return prompt.token_ids

    async def read_body(
        self, kind: str, body: bytes, max_context_tokens: int, max_prompts: int
    ) -> tuple[bytes, list[Encoded]]:
        """Read a body: see front/prompts/calls.py. Raises InvalidRequest, PromptTooLong, Overloaded."""
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


class _PromptProcess(TaskProcess):
    """`state`: of the tokenizer of the process."""

    def exceeded(self, task: Head, cpu_s: float) -> InvalidRequest:
        return InvalidRequest(
            f"tokenising the request needs more than {cpu_s:.3g} s of processor time or "
            f"{self.limits.max_memory_bytes >> 20} MiB. Send less",
            param="messages" if task["kind"] == CHAT else None,
        )

    def not_started(self) -> CheckpointError:
        return CheckpointError(
            "the process that tokenises prompts did not start: the checkpoint's chat template may need too much time "
            "or memory to compile. See the router's log, or remove the template"
        )
