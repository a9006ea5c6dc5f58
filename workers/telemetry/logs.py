"""Logs of every process of a cluster: as text, or one JSON object a line.

    {"time": "2026-01-31T12:00:00.000Z", "level": "WARNING", "logger": "diptych.worker", "process": "worker", "pid": 7,
     "message": "...", "request_id": "...", "trace_id": "...", "span_id": "..."}

The last three are there where the line belongs to a call: what runs for a call of the front door finds them in `CALL`,
whoever else knows a request names it by `extra={"request_id": ...}` or `request_ids`.
"""

import json
import logging
import os
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]
EXTRA = ("request_id", "request_ids", "trace_id", "span_id")


@dataclass(frozen=True, slots=True)
class CallIds:
    """Ids of the call for which code runs. Empty: not traced."""

    request_id: str
    trace_id: str = ""
    span_id: str = ""


CALL: ContextVar[CallIds | None] = ContextVar("diptych_call", default=None)


class JsonFormatter(logging.Formatter):
    """Formatter of one JSON object a line. `process`: kind of this process."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, object] = {
            "time": at,
            "level": record.levelname,
            "logger": record.name,
            "process": self._process,
            "pid": os.getpid(),
            "message": record.getMessage(),
        }
        if (call := CALL.get()) is not None:
            ids = {"request_id": call.request_id, "trace_id": call.trace_id, "span_id": call.span_id}
            line |= {name: value for name, value in ids.items() if value}
        line |= {name: value for name in EXTRA if (value := getattr(record, name, None))}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logs(form: LogFormat, process: str, text_format: str = logging.BASIC_FORMAT) -> None:
    """Write this process's logs, from INFO on, to standard error. `text_format`: of the lines that are text."""
    logging.basicConfig(level=logging.INFO, format=text_format)
    if form == "json":
        formatter = JsonFormatter(process)
        for handler in logging.getLogger().handlers:
            handler.setFormatter(formatter)
