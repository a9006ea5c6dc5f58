"""Logs as JSON: a line is an object, and has the ids of what it is about."""

import json
import logging
import subprocess
import sys
from pathlib import Path

from diptych.workers.telemetry.logs import CALL, CallIds, JsonFormatter

ROOT = Path(__file__).parents[3]


def line(record: logging.LogRecord) -> dict[str, object]:
    return json.loads(JsonFormatter("router").format(record))


def made(text: str, *args: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("diptych.test").makeRecord("diptych.test", 30, "f", 1, text, args, None, extra=extra)


def test_a_line_is_one_object() -> None:
    found = line(made("lost %s\nand more", "decode-1"))
    assert found.pop("time")
    assert found.pop("pid")
    assert found == {
        "level": "WARNING",
        "logger": "diptych.test",
        "process": "router",
        "message": "lost decode-1\nand more",
    }


def test_a_line_has_the_ids_of_its_call() -> None:
    token = CALL.set(CallIds("req-1", "a" * 32, "b" * 16))
    try:
        found = line(made("x"))
        own = line(made("x", request_id="other", request_ids=["1", "2"]))
    finally:
        CALL.reset(token)
    assert (found["request_id"], found["trace_id"], found["span_id"]) == ("req-1", "a" * 32, "b" * 16)
    assert (own["request_id"], own["request_ids"]) == ("other", ["1", "2"])
    assert "request_id" not in line(made("x"))


def test_an_exception_is_part_of_its_line() -> None:
    try:
        raise ZeroDivisionError("of nothing")
    except ZeroDivisionError:
        record = made("failed")
        record.exc_info = sys.exc_info()
    text = JsonFormatter("router").format(record)
    assert "\n" not in text
    assert "ZeroDivisionError: of nothing" in json.loads(text)["exception"]


def test_a_process_writes_all_its_lines_so() -> None:
    code = """
import logging
from diptych.workers.telemetry.logs import configure_logs
configure_logs("json", "worker")
logging.getLogger("diptych.worker").info("one")
logging.getLogger("other.library").warning("two")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [json.loads(each) for each in run.stderr.splitlines()]
    assert [(each["message"], each["process"]) for each in lines] == [("one", "worker"), ("two", "worker")]
