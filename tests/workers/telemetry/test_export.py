"""The thread that sends spans: it loses nothing that fits, and nobody waits for it."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from diptych.workers.common.errors import ConfigError
from diptych.workers.telemetry import otlp
from diptych.workers.telemetry.export import SpanExport
from diptych.workers.telemetry.settings import TraceSettings
from diptych.workers.telemetry.spans import SpanEvent, SpanKind, SpanRecord
from diptych.workers.telemetry.trace_context import SpanContext

from ...support.otlp_collector import grpc_collector, http_collector

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def record(name: str = "a") -> SpanRecord:
    return SpanRecord(name, SpanContext(TRACE, "1" * 16), None, 1_000, 2_000)


@dataclass
class Sink:
    """Takes spans; while `gate` is clear, it does not return."""

    takes: bool = True
    names: list[str] = field(default_factory=list[str])
    batches: list[int] = field(default_factory=list[int])
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)

    def send(self, records: Sequence[SpanRecord]) -> bool:
        self.entered.set()
        self.gate.wait()
        self.names += [each.name for each in records]
        self.batches.append(len(records))
        return self.takes


@contextmanager
def exporting(sink: Sink, **settings: object) -> Iterator[SpanExport]:
    export = SpanExport(TraceSettings("grpc", **settings), sink.send, sink.gate.set)  # type: ignore[arg-type]
    try:
        yield export
    finally:
        sink.gate.set()
        export.close()


def test_all_that_fits_is_sent_in_batches() -> None:
    sink = Sink()
    with exporting(sink, batch_spans=4, delay_s=3600.0) as export:
        for number in range(10):
            export.put(lambda number=number: [record(f"{number}a"), record(f"{number}b")])
        sink.gate.set()
    assert sink.names == [f"{number}{letter}" for number in range(10) for letter in "ab"]
    assert max(sink.batches) == 4
    assert (export.num_spans, export.num_dropped, export.num_waiting) == (20, 0, 0)


def test_what_waits_when_the_process_ends_is_sent_though_the_thread_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(threading.Thread):
        def start(self) -> None: ...

        def join(self, timeout: float | None = None) -> None:
            super().start()
            super().join(timeout)

    monkeypatch.setattr("diptych.workers.telemetry.export.threading.Thread", Late)
    sink = Sink()
    sink.gate.set()
    with exporting(sink, delay_s=3600.0) as export:
        export.put(lambda: [record("last")])
    assert sink.names == ["last"]


def test_a_collector_that_does_not_answer_holds_nobody_up_and_costs_a_bounded_number() -> None:
    sink = Sink()
    with exporting(sink, max_waiting=8, batch_spans=1, delay_s=0.001) as export:
        export.put(lambda: [record("first")])
        assert sink.entered.wait(60)
        for _ in range(20):
            export.put(lambda: [record()])  # returns, though the thread is stuck
        assert (export.num_waiting, export.num_dropped) == (8, 12)
    assert export.num_dropped == 12


def test_a_collector_that_is_down_is_one_line_and_so_is_its_return(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "diptych.traces")
    sink = Sink(takes=False)
    sink.gate.set()
    with exporting(sink, batch_spans=1, delay_s=0.001, endpoint="http://collector:4318") as export:
        for takes, num in ((False, 5), (True, 3)):
            sink.takes = takes
            for _ in range(num):
                export.put(lambda: [record()])
            while export.num_waiting or export.num_spans + export.num_dropped < 5:
                time.sleep(0.001)
    assert (export.num_dropped, export.num_spans) == (5, 3)
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        "traces cannot be sent to http",
        "traces are sent again",
    ]


def test_a_bug_in_the_spans_of_one_request_does_not_end_those_of_others(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    sink.gate.set()

    def broken() -> list[SpanRecord]:
        raise ZeroDivisionError

    with exporting(sink, delay_s=3600.0) as export:
        export.put(broken)
        export.put(lambda: [record("good")])
    assert sink.names == ["good"]
    assert export.num_dropped == 1
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("collecting", [http_collector, grpc_collector])
def test_spans_arrive_as_they_were_made(collecting: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.name=mine")
    protocol = "grpc" if collecting is grpc_collector else "http/protobuf"
    parent = SpanContext(TRACE, "2" * 16, True, "vendor=7")
    own = parent.child()
    made = SpanRecord(
        "chat tiny",
        own,
        parent,
        1_700_000_000_000_000_001,
        1_700_000_000_000_000_009,
        SpanKind.SERVER,
        {"a": 1, "b": 0.5, "c": "text", "d": True, "e": ["x", "y"]},
        (SpanEvent("submitted", 1_700_000_000_000_000_002, {"diptych.worker": "decode-1"}),),
        "worker_lost",
    )
    with collecting() as collector:  # type: ignore[operator]
        settings = TraceSettings(protocol, collector.endpoint, delay_s=0.01)
        export = SpanExport.open(settings, {"service.name": "diptych-router", "service.version": "1"})
        assert export is not None
        export.put(lambda: [made, record()])
        (found, root) = collector.wait_for(lambda spans: len(spans) == 2 and spans)
        export.close()
    assert (found.name, found.trace_id, found.span_id, found.parent_id) == ("chat tiny", TRACE, own.span_id, "2" * 16)
    assert (found.start_ns, found.end_ns) == (made.start_ns, made.end_ns)
    assert (found.kind, found.status, found.state) == (2, 2, "vendor=7")
    assert found.attributes == made.attributes
    assert found.events == [("submitted", {"diptych.worker": "decode-1"})]
    assert (root.parent_id, root.kind, root.status) == ("", 1, 0)
    assert found.resource["service.name"] == "mine"  # the variable wins
    assert (found.resource["deployment.environment"], found.resource["service.version"]) == ("test", "1")


def test_what_is_not_installed_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "find_spec", lambda _: None)
    otlp.check_installed(None)
    message = r"traces are configured .* opentelemetry.sdk.trace is not installed: run `pip install 'diptych\[otel\]'`"
    with pytest.raises(ConfigError, match=message):
        SpanExport.open(TraceSettings("grpc"), {})


def test_a_router_and_a_worker_without_traces_import_nothing_of_opentelemetry() -> None:
    code = """
import sys
from diptych.cluster.placement.router_process import RouterProcess, open_traces
from diptych.cluster.common.config_file import build
from diptych.workers.server.service import WorkerService
from diptych.workers.server.spans import open_spans
from diptych.workers.config.worker_config import WorkerConfig
assert open_traces(build({"model": "m", "pools": {"mixed": {}}})) is None
assert open_spans(WorkerConfig.of("m"), "incarnation") is None
sys.exit(any(name.startswith("opentelemetry") for name in sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
