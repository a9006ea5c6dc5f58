"""Lines of a batch file in OpenAI's format: checked whole before any is sent, then read one at a time."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from ...workers.common.errors import WorkloadError

MAX_LINE_BYTES = 64 << 20
EXAMPLE = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "tiny", "messages": []}}'
)
FIELDS = frozenset(("custom_id", "method", "url", "body"))


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Request of a batch. `body`: JSON."""

    custom_id: str
    path: str
    body: bytes


def checked_ids(file: IO[bytes], name: str) -> list[str]:
    """The ids of all lines, each once. Raises WorkloadError."""
    first: dict[str, int] = {}
    for number, line in _numbered(file, name):
        if (earlier := first.setdefault(line.custom_id, number)) != number:
            raise WorkloadError(f"{name}:{number}: custom_id {line.custom_id!r} is already that of line {earlier}")
    if not first:
        raise WorkloadError(f"{name} holds no request. A line is for example {EXAMPLE}")
    return list(first)


def batch_lines(file: IO[bytes], name: str) -> Iterator[BatchLine]:
    """Every line from the beginning of the file; empty ones are left out. Raises WorkloadError."""
    return (line for _, line in _numbered(file, name))


def _numbered(file: IO[bytes], name: str) -> Iterator[tuple[int, BatchLine]]:
    file.seek(0)
    number = 0
    while text := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(text) > MAX_LINE_BYTES:
            raise WorkloadError(f"{name}:{number}: the line has more than {MAX_LINE_BYTES >> 20} MiB: shorten it")
        if text.strip():
            try:
                yield number, _parse(text)
            except (ValueError, RecursionError) as e:
                raise WorkloadError(f"{name}:{number}: {e}. A line is for example {EXAMPLE}") from e


def _parse(text: bytes) -> BatchLine:
    """Raises ValueError."""
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError("the line is not a JSON object")
    if unknown := fields.keys() - FIELDS:
        raise ValueError(f"unknown field {min(unknown)!r}; known are {', '.join(sorted(FIELDS))}")
    custom_id, method, url, body = (fields.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id must be a non-empty string")
    if method != "POST":
        raise ValueError(f"method must be 'POST', got {method!r}")
    if not isinstance(url, str) or not url.startswith("/v1/"):
        raise ValueError(f"url must be a path that begins with /v1/, got {url!r}")
    if not isinstance(body, dict):
        raise ValueError("body must be an object")
    if body.get("stream"):
        raise ValueError("a batch cannot stream: remove `stream` from the body")
    return BatchLine(custom_id, url, json.dumps(body).encode())
