"""Speeds of links and of prefill are those of lately, and a link that was slow is tried again."""

import pytest

from diptych.cluster.routing.fleet import FleetWorker, WorkerInfo
from diptych.cluster.routing.kv_costs import DEFAULT_LINK_BYTES_S, compute_s, link_bytes_s
from diptych.proto import worker_pb2

FAST, SLOW = 10e9, 0.1e9  # bytes per second


class Sink:
    """A worker that reads from others, and reports ten times a second."""

    def __init__(self, *sources: str) -> None:
        self.now = 100.0
        self.view = FleetWorker(WorkerInfo("d", "d:1", "decode", "decode"))
        self.counters: dict[str, tuple[int, float]] = dict.fromkeys(sources, (0, 0.0))

    def read(self, source: str, speed: float, seconds: float, *, busy: float = 0.5) -> None:
        """Read for so long, `busy` of the time."""
        for _ in range(round(seconds * 10)):
            num_bytes, read_s = self.counters[source]
            self.counters[source] = num_bytes + round(0.1 * busy * speed), read_s + 0.1 * busy
            self.report()

    def report(self, after_s: float = 0.1) -> None:
        links = [
            worker_pb2.PeerLink(incarnation=source, num_bytes=num_bytes, read_s=read_s)
            for source, (num_bytes, read_s) in self.counters.items()
        ]
        self.now += after_s
        self.view.take(worker_pb2.LoadReport(links=links))
        self.view.reported_at = self.now
        self.speed("")

    def speed(self, source: str) -> float:
        return link_bytes_s(FleetWorker(WorkerInfo(source, "s:1", "prefill", "prefill")), self.view)


def test_the_speed_of_a_link_is_that_of_lately() -> None:
    sink = Sink("p")
    sink.read("p", FAST, 60)
    assert sink.speed("p") == pytest.approx(FAST)
    sink.read("p", SLOW, 60)
    assert sink.speed("p") == pytest.approx(SLOW, rel=0.3)
    sink.read("p", FAST, 60)
    assert sink.speed("p") == pytest.approx(FAST, rel=0.3)


def test_a_slow_link_is_thought_usual_again_if_nothing_is_read() -> None:
    sink = Sink("p")
    sink.read("p", SLOW, 60)
    found = [sink.speed("p")]
    for _ in range(12):
        sink.report(after_s=30)
        found.append(sink.speed("p"))
    assert found == sorted(found) and found[0] == pytest.approx(SLOW)
    assert found[2] < DEFAULT_LINK_BYTES_S / 2 and found[-1] == pytest.approx(DEFAULT_LINK_BYTES_S, rel=0.05)
    sink.read("p", FAST, 0.2)  # one transfer tells how it is now
    assert sink.speed("p") == pytest.approx(FAST, rel=0.1)


def test_a_silent_link_is_thought_like_the_others() -> None:
    sink = Sink("p", "q")
    sink.read("p", SLOW, 10)
    sink.read("q", FAST, 20)
    assert sink.speed("p") < FAST / 10
    sink.read("q", FAST, 400)
    assert sink.speed("p") == pytest.approx(FAST, rel=0.1)
    assert sink.speed("never read") == pytest.approx(FAST, rel=0.01)


def test_counters_that_begin_anew_count() -> None:
    sink = Sink("p")
    sink.read("p", FAST, 10)
    sink.counters["p"] = (0, 0.0)
    sink.read("p", SLOW, 60)
    assert sink.speed("p") == pytest.approx(SLOW, rel=0.3)


def test_a_broken_link_to_the_router_forgets_nothing() -> None:
    sink = Sink("p")
    sink.read("p", FAST, 600)
    sink.read("p", SLOW, 60)
    kept, sink.counters = sink.counters, {}
    sink.report()
    sink.counters = kept
    sink.report()
    assert sink.speed("p") == pytest.approx(SLOW, rel=0.3)


def test_the_speed_of_prefill_is_that_of_lately() -> None:
    view = FleetWorker(WorkerInfo("p", "p:1", "prefill", "prefill"))
    num_tokens, prefill_s = 0, 0.0
    for number, tokens_s in enumerate([1000.0] * 600 + [100.0] * 600):
        num_tokens, prefill_s = num_tokens + round(0.1 * tokens_s), prefill_s + 0.1
        view.take(worker_pb2.LoadReport(num_prefill_tokens=num_tokens, prefill_s=prefill_s))
        view.reported_at = number / 10
        compute_s(view, 1, [view])
    assert compute_s(view, 100, [view]) == pytest.approx(1.0, rel=0.05)
    assert compute_s(FleetWorker(WorkerInfo("q", "q:1", "prefill", "prefill")), 100, [view]) == pytest.approx(1.0, 0.05)
