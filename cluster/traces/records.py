"""Reads request traces in public formats: times, lengths and shared blocks of requests. Errors name file, line and
field. A file may be compressed by gzip.

azure      CSV with the columns TIMESTAMP (ISO 8601), ContextTokens, GeneratedTokens (2023 and 2024)
burstgpt   CSV with the columns Timestamp (s), Request tokens, Response tokens; requests without a response failed, and
           are left out
mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids: one id for each 512 input tokens, the
           last one's block cut to what is left; blocks of the same id hold the same tokens
bailian    JSON lines (Alibaba, Qwen): timestamp (s), input_length, output_length, hash_ids for each 16 input tokens
"""

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from ...workers.common.errors import WorkloadError

MAX_LINE_TOKENS = 100_000_000
MAX_DIGITS = 18  # of a number that is read: more would cost time
MAX_HASH_ID = (1 << 63) - 1
MAX_TIME = 1e15  # ms, or s: beyond any clock's
GZIP_MAGIC = b"\x1f\x8b"
_BROKEN = (gzip.BadGzipFile, EOFError, zlib.error)  # raised by a file that gzip does not understand, or not whole
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
BLOCK_TOKENS = {"mooncake": 512, "bailian": 16}  # input tokens of a hash id, of the formats that have any


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Request of a trace. `at_s`: seconds from the first one; `block_ids`: of its input, empty where none are told."""

    at_s: float
    num_input: int
    num_output: int
    block_ids: Sequence[int] = ()


def read_trace(name: str, path: Path, num: int) -> list[TraceRequest]:
    """First `num` requests of a file in the format `name`, in order of time. Raises WorkloadError."""
    requests = list(islice(_READERS[name](path), num))
    if not requests:
        raise WorkloadError(f"{path} contains no request")
    first_s = min(request.at_s for request in requests)
    moved = [TraceRequest(r.at_s - first_s, r.num_input, r.num_output, r.block_ids) for r in requests]
    return sorted(moved, key=lambda request: request.at_s)


def _azure(path: Path) -> Iterator[TraceRequest]:
    first: datetime | None = None
    for row, where in _rows(path, AZURE_COLUMNS):
        at = _instant(row["TIMESTAMP"], where)
        first = at if first is None else first
        if (at.tzinfo is None) != (first.tzinfo is None) or at < first:
            raise WorkloadError(f"{where}: TIMESTAMP {row['TIMESTAMP']} is before the first line's. Sort the file")
        num_input = count(row["ContextTokens"], "ContextTokens", where)
        num_output = count(row["GeneratedTokens"], "GeneratedTokens", where)
        yield TraceRequest((at - first).total_seconds(), num_input, num_output)


def _burstgpt(path: Path) -> Iterator[TraceRequest]:
    for row, where in _rows(path, BURSTGPT_COLUMNS):
        at_s = _seconds(row["Timestamp"], "Timestamp", where)
        num_input = count(row["Request tokens"], "Request tokens", where, least=0)
        num_output = count(row["Response tokens"], "Response tokens", where, least=0)
        if num_input and num_output:
            yield TraceRequest(at_s, num_input, num_output)


def _mooncake(path: Path) -> Iterator[TraceRequest]:
    for request, where in _objects(path):
        at_s = _seconds(request.get("timestamp"), "timestamp", where, unit="milliseconds") / 1000
        yield _hashed(request, where, at_s, BLOCK_TOKENS["mooncake"])


def _bailian(path: Path) -> Iterator[TraceRequest]:
    for request, where in _objects(path):
        at_s = _seconds(request.get("timestamp"), "timestamp", where)
        yield _hashed(request, where, at_s, BLOCK_TOKENS["bailian"])


_READERS: dict[str, Callable[[Path], Iterator[TraceRequest]]] = {
    "azure": _azure,
    "burstgpt": _burstgpt,
    "mooncake": _mooncake,
    "bailian": _bailian,
}
FORMATS = tuple(_READERS)


def _hashed(request: Mapping[str, Any], where: str, at_s: float, block_tokens: int) -> TraceRequest:
    hash_ids = request.get("hash_ids")
    if not (isinstance(hash_ids, list) and all(type(i) is int and 0 <= i <= MAX_HASH_ID for i in hash_ids)):
        raise WorkloadError(f"{where}: hash_ids must be a list of integers from 0 to {MAX_HASH_ID}")
    num_input = count(request.get("input_length"), "input_length", where)
    num_blocks = -(-num_input // block_tokens)
    if num_blocks != len(hash_ids):
        raise WorkloadError(
            f"{where}: {num_input} input tokens are {num_blocks} blocks of {block_tokens}, "
            f"but hash_ids has {len(hash_ids)}"
        )
    return TraceRequest(at_s, num_input, count(request.get("output_length"), "output_length", where), hash_ids)


@contextmanager
def opened(path: Path) -> Generator[IO[str]]:
    """Open a file of text, which gzip may have compressed. A byte order mark is left out. Raises WorkloadError."""
    with ExitStack() as stack:
        try:
            raw = stack.enter_context(path.open("rb"))
            is_gzip = raw.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)
        except OSError as e:
            raise WorkloadError(f"cannot read {path}: {e.strerror}. Check the path") from e
        binary = stack.enter_context(gzip.GzipFile(fileobj=raw)) if is_gzip else raw
        yield stack.enter_context(io.TextIOWrapper(cast(BinaryIO, binary), encoding="utf-8-sig", newline=""))


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[dict[str, str | None], str]]:
    """Rows of a CSV file, each with its name for errors."""
    with opened(path) as file:
        rows: csv.DictReader[str] = csv.DictReader(file)
        try:
            if not set(columns) <= set(rows.fieldnames or ()):
                raise WorkloadError(f"{path} line 1: the columns must be {','.join(columns)}, got {rows.fieldnames}")
            for row in rows:
                yield row, f"{path} line {rows.line_num}"
        except (csv.Error, UnicodeDecodeError, *_BROKEN) as e:
            raise WorkloadError(f"{path} after line {rows.line_num}: it is not CSV text: {e}") from e


def _objects(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """JSON objects of a file, one on each line that is not empty, each with its name for errors."""
    with opened(path) as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path} line {number}"
                    yield _json_object(line, where), where
        except (UnicodeDecodeError, *_BROKEN) as e:
            raise WorkloadError(f"{path}: it is not UTF-8 text: {e}") from e


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise WorkloadError(f"{where}: it is not JSON: {e}. Each line must be one request") from e
    if not isinstance(value, dict):
        raise WorkloadError(f"{where}: a JSON object is expected, got {line.strip()[:40]!r}")
    return value


def count(value: object, name: str, where: str, *, least: int = 1) -> int:
    """Count from a JSON number or a CSV field. Raises WorkloadError."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) <= MAX_DIGITS:
        value = int(value)
    # JSON of some tools writes whole numbers as 600.0.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not least <= value <= MAX_LINE_TOKENS:
        raise WorkloadError(
            f"{where}: {name} must be a whole number from {least} to {MAX_LINE_TOKENS}, got {value!r:.60}"
        )
    return value


def _seconds(value: object, name: str, where: str, unit: str = "seconds") -> float:
    """Time from a JSON number or a CSV field, in its `unit`. Raises WorkloadError."""
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds < MAX_TIME:
        raise WorkloadError(f"{where}: {name} must be a number of {unit} of at least 0, got {value!r:.60}")
    return seconds


def _instant(text: str | None, where: str) -> datetime:
    try:
        return datetime.fromisoformat(text or "")
    except ValueError as e:
        raise WorkloadError(f"{where}: TIMESTAMP must be a time such as 2023-11-16 18:15:46.68, got {text!r}") from e
