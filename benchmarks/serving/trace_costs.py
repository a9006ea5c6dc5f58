"""Costs of the trace of one call, in processor time: on the router's event loop, and on the thread that sends spans.

python -m benchmarks.serving.trace_costs [--calls 2000] [--rounds 7]

The call is a disaggregated one, of 11 spans. Nothing is sent: the network is not part of it.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from diptych.cluster.common.timings import RequestTimes, RequestTimings
from diptych.cluster.front.access.usage import Usage
from diptych.cluster.telemetry.call_trace import Tracer
from diptych.cluster.telemetry.http_trace import begin_http, end_http
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.telemetry.export import MakeSpans, SpanExport
from diptych.workers.telemetry.otlp import readable_by
from diptych.workers.telemetry.settings import TraceSettings

TIMINGS = RequestTimings(0.25, 0.5, 0.125, 0.0625, 0.25, 0.5, 0.125, 0.25, 0.25, 4.0, 64, "nixl")
REQUEST = Request("cmpl-0", (1, 2, 3), SamplingParams(), 60.0)
PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
HEADERS = [(b"host", b"router"), (b"content-type", b"application/json"), (b"traceparent", PARENT)]


class Answer:
    """Answer of the call."""

    usage = Usage(3, 16, 0)
    finish_reasons = ("length",)


class Unsent(SpanExport):
    """Export that keeps the newest call and sends none."""

    def __init__(self) -> None:
        super().__init__(TraceSettings("http/protobuf"), lambda _: True, lambda: None)
        self.newest: MakeSpans = list

    def put(self, make: MakeSpans) -> None:
        self.newest = make


def trace_call(tracer: Tracer) -> None:
    """Do what the event loop does for the trace of a call."""
    trace = begin_http(tracer, "POST", "/v1/completions", "http", HEADERS, 10.0, "req-0")
    assert trace is not None
    journal = trace.journal(0)
    trace.follow(Answer(), "tiny", REQUEST, request_id="cmpl-0")
    for part in ("prefill", "decode"):
        journal.note(11.0, "submitted", f"{part}-1", part)
    journal.times, journal.timings, journal.ended_at = RequestTimes(11.0, delivered_at=[12.0, 13.0]), TIMINGS, 15.0
    end_http(tracer, trace, 200, 16.0)


def cost_s(work: Callable[[], object], calls: int, rounds: int) -> float:
    """Processor time of one `work` in seconds: the median of the rounds."""
    found: list[float] = []
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(calls):
            work()
        found.append((time.thread_time() - began) / calls)
    return statistics.median(found)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    export = Unsent()
    tracer, readable = Tracer(export), readable_by({"service.name": "diptych-router"})
    on_loop = cost_s(lambda: trace_call(tracer), args.calls, args.rounds)
    make = export.newest
    num_spans = len(list(make()))

    def send() -> None:
        encode_spans([readable(span) for span in make()]).SerializeToString()

    on_thread = cost_s(send, max(args.calls // 10, 1), args.rounds)
    export.close()
    print(f"{num_spans} spans: event loop {on_loop * 1e3:.3f} ms, thread {on_thread * 1e3:.3f} ms a call")


if __name__ == "__main__":
    main()
