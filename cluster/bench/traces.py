"""Reads workloads from files: request traces in two public formats, conversations. Errors name file, line and field.

azure      CSV with the columns TIMESTAMP (ISO 8601), ContextTokens, GeneratedTokens
mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids: one id for each 512 input tokens, the
           last one's block cut to what is left; blocks of the same id hold the same tokens
sharegpt   a JSON array of objects whose `conversations` are a list of {"from": "human" | "gpt", "value": text}
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...workers.common.errors import WorkloadError
from ..tokens.tokenizer import Tokenizer
from .text import TextSource
from .types import Session, Text, Turn

BLOCK_TOKENS = 512  # Mooncake's
MAX_LINE_TOKENS = 100_000_000
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
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


def azure_sessions(path: Path, limits: TraceLimits, source: TextSource, rng: np.random.Generator) -> list[Session]:
    """Raises WorkloadError."""
    sessions: list[Session] = []
    first: datetime | None = None
    for row, where in _azure_rows(path, limits.num):
        at = _instant(row["TIMESTAMP"], where)
        first = at if first is None else first
        if (at.tzinfo is None) != (first.tzinfo is None) or at < first:
            raise WorkloadError(f"{where}: TIMESTAMP {row['TIMESTAMP']} is before the first line's. Sort the file")
        num_input = limits.input(_count(row["ContextTokens"], "ContextTokens", where))
        num_output = limits.output(_count(row["GeneratedTokens"], "GeneratedTokens", where))
        turn = Turn(source.make(num_input, rng), num_input, num_output)
        sessions.append(Session((turn,), (at - first).total_seconds() * limits.time_scale))
    return _some(sessions, path)


def mooncake_sessions(path: Path, limits: TraceLimits, source: TextSource, seed: int) -> list[Session]:
    """Raises WorkloadError."""
    # A scaled trace keeps its shared prefixes: blocks are scaled like prompts.
    blocks = _Blocks(max(1, round(BLOCK_TOKENS * limits.length_scale)), source, seed)
    requests = [_mooncake_request(line, where) for line, where in _lines(path, limits.num)]
    first_s = min((request.at_s for request in requests), default=0.0)
    sessions: list[Session] = []
    for request in requests:
        num_input = _cut(request.num_input * blocks.num_tokens / BLOCK_TOKENS, limits.max_input)
        turn = Turn(blocks.text(request.hash_ids, num_input), num_input, limits.output(request.num_output))
        sessions.append(Session((turn,), (request.at_s - first_s) * limits.time_scale))
    return _some(sessions, path)


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
    return _some(sessions, path)


@dataclass(frozen=True, slots=True)
class _MooncakeRequest:
    at_s: float
    num_input: int
    num_output: int
    hash_ids: list[int]


def _mooncake_request(line: str, where: str) -> _MooncakeRequest:
    request = _json_object(line, where)
    hash_ids = request.get("hash_ids")
    if not (isinstance(hash_ids, list) and all(type(i) is int and i >= 0 for i in hash_ids)):
        raise WorkloadError(f"{where}: hash_ids must be a list of whole numbers from 0 on")
    num_input = _count(request.get("input_length"), "input_length", where)
    num_blocks = -(-num_input // BLOCK_TOKENS)
    if num_blocks != len(hash_ids):
        raise WorkloadError(
            f"{where}: {num_input} input tokens are {num_blocks} blocks of {BLOCK_TOKENS}, "
            f"but hash_ids has {len(hash_ids)}"
        )
    num_output = _count(request.get("output_length"), "output_length", where)
    at_s = _count(request.get("timestamp"), "timestamp", where, least=0) / 1000
    return _MooncakeRequest(at_s, num_input, num_output, hash_ids)


class _Blocks:
    """Text of each hash id."""

    def __init__(self, num_tokens: int, source: TextSource, seed: int) -> None:
        self.num_tokens = num_tokens
        self._source = source
        self._seed = seed
        self._made: dict[int, Text] = {}

    def text(self, hash_ids: list[int], num_tokens: int) -> Text:
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


def _opened(path: Path) -> Any:
    try:
        return path.open(encoding="utf-8", newline="")
    except OSError as e:
        raise WorkloadError(f"cannot read {path}: {e.strerror}. Check the path") from e


def _azure_rows(path: Path, num: int) -> Iterator[tuple[dict[str, str | None], str]]:
    """First `num` rows, each with its name for errors."""
    with _opened(path) as file:
        rows: csv.DictReader[str] = csv.DictReader(file)
        try:
            if not set(AZURE_COLUMNS) <= set(rows.fieldnames or ()):
                wanted = ",".join(AZURE_COLUMNS)
                raise WorkloadError(f"{path} line 1: the columns must be {wanted}, got {rows.fieldnames}")
            for row in islice(rows, num):
                yield row, f"{path} line {rows.line_num}"
        except (csv.Error, UnicodeDecodeError) as e:
            raise WorkloadError(f"{path} after line {rows.line_num}: it is not CSV text: {e}") from e


def _lines(path: Path, num: int) -> Iterator[tuple[str, str]]:
    """First `num` lines that are not empty, each with its name for errors."""
    with _opened(path) as file:
        try:
            filled = ((line, f"{path} line {number}") for number, line in enumerate(file, 1) if line.strip())
            yield from islice(filled, num)
        except UnicodeDecodeError as e:
            raise WorkloadError(f"{path}: it is not UTF-8 text: {e}") from e


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as e:
        raise WorkloadError(f"{where}: it is not JSON: {e}. One request a line is expected") from e
    if not isinstance(value, dict):
        raise WorkloadError(f"{where}: a JSON object is expected, got {line.strip()[:40]!r}")
    return value


def _count(value: object, name: str, where: str, *, least: int = 1) -> int:
    """Count from a JSON number or a CSV field."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    # Mooncake's later traces write whole timestamps as 27000.0.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not least <= value <= MAX_LINE_TOKENS:
        raise WorkloadError(f"{where}: {name} must be a whole number from {least} to {MAX_LINE_TOKENS}, got {value!r}")
    return value


def _instant(text: str | None, where: str) -> datetime:
    try:
        return datetime.fromisoformat(text or "")
    except ValueError as e:
        raise WorkloadError(f"{where}: TIMESTAMP must be an instant as 2023-11-16 18:15:46.68, got {text!r}") from e


def _cut(num_tokens: float, most: int) -> int:
    rounded = max(1, round(num_tokens))
    return min(rounded, most) if most else rounded


def _some(sessions: list[Session], path: Path) -> list[Session]:
    if not sessions:
        raise WorkloadError(f"{path} holds nothing to send")
    return sessions
