"""Thread that sends spans to a collector. Whoever has some never waits: what does not fit is dropped and counted.

    event loop ── put(make) ──> bounded queue ──a batch, or some seconds──> thread: make() -> spans -> OTLP

Spans are made on the thread too, so that a request's end costs its event loop no more than an entry of the queue. A
collector that does not answer is reported once, and once when it answers again.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from .otlp import Send, open_exporter
from .settings import TraceSettings
from .spans import SpanRecord

CLOSE_S = 1.0  # for what is left, when the process ends
WAKE_AT = 64  # parts that wait: they are not kept for long

log = logging.getLogger("diptych.traces")

MakeSpans = Callable[[], Iterable[SpanRecord]]


class SpanExport:
    """Queue and thread of one process. `put` on one event loop; counters may be read anywhere."""

    def __init__(self, settings: TraceSettings, send: Send, end: Callable[[], object]) -> None:
        self.sampler = settings.sampler
        self.num_dropped = 0  # parts of traces: the queue was full, or the collector did not take them
        self.num_spans = 0  # that the collector took
        self._settings = settings
        self._send, self._end = send, end
        self._waiting: deque[MakeSpans] = deque()
        self._wake = threading.Event()
        self._is_ending = self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="diptych-traces", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, settings: TraceSettings | None, resource: Mapping[str, str]) -> "SpanExport | None":
        """Begin to export, as the settings say. None: traces are off. Raises ConfigError where OpenTelemetry is not
        installed."""
        return None if settings is None else cls(settings, *open_exporter(settings, resource))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def put(self, make: MakeSpans) -> None:
        """Have the spans sent that `make` returns; it is called on another thread."""
        if len(self._waiting) >= self._settings.max_waiting:
            self.num_dropped += 1
            return
        self._waiting.append(make)
        if len(self._waiting) >= WAKE_AT:
            self._wake.set()

    def close(self) -> None:
        """Send what waits, for CLOSE_S at most. Blocks; idempotent."""
        self._is_ending = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        self._end()

    def _run(self) -> None:
        while not self._is_ending:
            self._wake.wait(self._settings.delay_s)
            self._wake.clear()
            self._send_all()
        self._send_all()  # what came between the last look and the end

    def _send_all(self) -> None:
        while self._waiting:
            self._send_some()

    def _send_some(self) -> None:
        """Send a batch."""
        records: list[SpanRecord] = []
        num_parts, took = 0, False
        try:
            while self._waiting and len(records) < self._settings.batch_spans:
                num_parts += 1
                records += self._waiting.popleft()()
            took = self._send(records)
        except Exception:
            # The thread's top loop: a bug in one request's spans must not end those of others.
            log.exception("spans could not be sent by our own fault")
        if took:
            self.num_spans += len(records)
        else:
            self.num_dropped += num_parts
        self._report(failed=not took)

    def _report(self, *, failed: bool) -> None:
        if failed and not self._is_failing:
            log.warning(
                "traces cannot be sent to %s: they are dropped until it takes them. Check otlp_endpoint, or the "
                "OTEL_EXPORTER_OTLP_* variables",
                self._settings.endpoint or "the collector",
            )
        elif self._is_failing and not failed:
            log.info("traces are sent again")
        self._is_failing = failed
