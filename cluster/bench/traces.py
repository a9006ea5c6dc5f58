"""Makes workloads of files: request traces (cluster/traces/records.py), and conversations. Errors name the file and
what is wrong in it.

sharegpt   a JSON array of objects whose `conversations` are a list of {"from": "human" | "gpt", "value": text}
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from ...workers.common.errors import WorkloadError
from ..tokens.tokenizer import Tokenizer
from ..traces.records import BLOCK_TOKENS, read_trace
from .text import TextSource
from .types import Session, Text, Turn

_CLIENT, _SERVER = ("human", "user"), ("gpt", "chatgpt", "bard", "assistant")


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """Part of a file to use: its first `num` requests, gaps times `time_scale`, lengths times `length_scale`, cut to
    `max_input` and `max_output` tokens (0: not cut)."""

    num: int
    time_scale: float = 1.0
    length_scale: float = 1.0
    max_input: int = 0
    max_output: int = 0

    def input(self, num_tokens: int) -> int:
        return _cut(num_tokens * self.length_scale, self.max_input)

    def output(self, num_tokens: int) -> int:
        return _cut(num_tokens * self.length_scale, self.max_output)


def trace_sessions(name: str, path: Path, limits: TraceLimits, source: TextSource, seed: int) -> list[Session]:
    """Sessions of one turn, from a trace in the format `name`. Raises WorkloadError."""
    rng, block_tokens = np.random.default_rng(seed), BLOCK_TOKENS.get(name, 0)
    # A scaled trace keeps its shared prefixes: blocks are scaled like prompts.
    scaled_tokens = max(1, round(block_tokens * limits.length_scale))
    blocks = _Blocks(scaled_tokens, source, seed)
    sessions: list[Session] = []
    for request in read_trace(name, path, limits.num):
        if block_tokens:
            num_input = _cut(request.num_input * scaled_tokens / block_tokens, limits.max_input)
            text = blocks.text(request.block_ids, num_input)
        else:
            num_input = limits.input(request.num_input)
            text = source.make(num_input, rng)
        turn = Turn(text, num_input, limits.output(request.num_output))
        sessions.append(Session((turn,), request.at_s * limits.time_scale))
    return sessions


def sharegpt_sessions(path: Path, limits: TraceLimits, tokenizer: Tokenizer) -> list[Session]:
    """Sessions of the clients' messages, with answers as long as the recorded ones, made by the server. A conversation
    ends where it would exceed `max_input`. Raises WorkloadError."""
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise WorkloadError(f"cannot read {path}: {e}. Give a JSON file of conversations in ShareGPT's format") from e
    if not isinstance(conversations, list):
        raise WorkloadError(f"{path}: the file must hold a JSON array of conversations")
    sessions: list[Session] = []
    for number, conversation in enumerate(conversations):
        if len(sessions) == limits.num:
            break
        if turns := _turns(_said(conversation, f"{path} conversation {number}"), limits, tokenizer):
            sessions.append(Session(turns))
    if not sessions:
        raise WorkloadError(f"{path} contains no request")
    return sessions


class _Blocks:
    """Text of each hash id."""

    def __init__(self, num_tokens: int, source: TextSource, seed: int) -> None:
        self.num_tokens = num_tokens
        self._source = source
        self._seed = seed
        self._made: dict[int, Text] = {}

    def text(self, hash_ids: Sequence[int], num_tokens: int) -> Text:
        parts: list[Text] = []
        for hash_id in hash_ids:
            if hash_id not in self._made:
                rng = np.random.default_rng((self._seed, hash_id))
                self._made[hash_id] = self._source.make(self.num_tokens, rng)
            parts.append(self._made[hash_id])
        return self._source.cut(self._source.join(parts), num_tokens)


def _said(conversation: object, where: str) -> list[tuple[str, str]]:
    """Speaker and text of each message, in order. Raises WorkloadError."""
    messages = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(messages, list):
        raise WorkloadError(f"{where}: no list named `conversations`")
    said: list[tuple[str, str]] = []
    for i, message in enumerate(messages):
        who, what = (message.get("from"), message.get("value")) if isinstance(message, dict) else (None, None)
        if not (isinstance(who, str) and isinstance(what, str)):
            raise WorkloadError(f"{where}, message {i}: `from` and `value` must be texts")
        said.append((who, what))
    return said


def _turns(said: list[tuple[str, str]], limits: TraceLimits, tokenizer: Tokenizer) -> tuple[Turn, ...]:
    """Turns: each message of the client that an answer follows."""
    turns: list[Turn] = []
    total = 0
    for (who, what), (next_who, answer) in pairwise(said):
        if who not in _CLIENT or next_who not in _SERVER or not (what.strip() and answer.strip()):
            continue
        num_input = len(tokenizer.encode(what, special=False))
        num_output = limits.output(len(tokenizer.encode(answer, special=False)))
        if limits.max_input and total + num_input > limits.max_input:
            break
        turns.append(Turn(what, num_input, num_output))
        total += num_input + num_output
    return tuple(turns)


def _cut(num_tokens: float, most: int) -> int:
    rounded = max(1, round(num_tokens))
    return min(rounded, most) if most else rounded
