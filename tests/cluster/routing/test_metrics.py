"""What Prometheus reads."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from diptych.cluster.common.prediction import Level
from diptych.cluster.common.timings import RequestTimes, RequestTimings
from diptych.cluster.common.worker_stats import TransferStats
from diptych.cluster.routing.fleet import FleetWorker, WorkerInfo
from diptych.cluster.routing.metrics import RouterMetrics
from diptych.proto import worker_pb2
from diptych.workers.common.request import RequestLevel


def samples(metrics: RouterMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def test_one_request_from_receipt_to_end() -> None:
    metrics = RouterMetrics(list)
    times = RequestTimes(started_at=10.0)
    metrics.began(num_prompt_tokens=7)
    assert samples(metrics)["diptych_requests_in_flight", ()] == 1
    times.routed_at = 10.5
    metrics.delivered(times, 1, now=11.0)
    metrics.delivered(times, 2, now=11.25)
    metrics.ended(times, "stop", now=12.0)
    metrics.refused(3)
    found = samples(metrics)
    assert found["diptych_requests_total", (("outcome", "stop"),)] == 1
    assert found["diptych_requests_total", (("outcome", "rate_limit_exceeded"),)] == 3
    assert found["diptych_requests_in_flight", ()] == 0
    assert (found["diptych_prompt_tokens_total", ()], found["diptych_generation_tokens_total", ()]) == (7, 3)
    for name, seconds in (
        ("time_to_first_token", 1.0),
        ("inter_token_latency", 0.25),
        ("request", 2.0),
        ("request_queue", 0.5),
    ):
        assert found[f"diptych_{name}_seconds_sum", ()] == seconds
        assert found[f"diptych_{name}_seconds_count", ()] == 1


def test_latencies_between_tokens_are_counted_by_their_bounds() -> None:
    metrics = RouterMetrics(list)
    times = RequestTimes(started_at=0.0)
    metrics.began(num_prompt_tokens=1)
    for now in (1.0, 1.001, 1.0035, 1.0035 + 0.02, 9.0):
        metrics.delivered(times, 1, now)
    found = samples(metrics)
    name = "diptych_inter_token_latency_seconds"
    bounds = {dict(labels)["le"]: value for (sample, labels), value in found.items() if sample == f"{name}_bucket"}
    assert (bounds["0.0025"], bounds["0.005"], bounds["0.03"], bounds["2.5"], bounds["+Inf"]) == (1, 2, 3, 3, 4)
    assert found[f"{name}_count", ()] == 4
    assert found[f"{name}_sum", ()] == pytest.approx(8.0)


def test_a_request_that_never_reached_a_worker_waited_all_its_life() -> None:
    metrics = RouterMetrics(list)
    metrics.began(1)
    metrics.ended(RequestTimes(started_at=1.0), "service_unavailable", now=4.0)
    assert samples(metrics)["diptych_request_queue_seconds_sum", ()] == 3.0


@pytest.mark.parametrize("transport", ["", "nixl"])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_phases_of_a_request(num_tokens: int, transport: str) -> None:
    metrics = RouterMetrics(list)
    times = RequestTimes(started_at=10.0)
    metrics.began(1)
    times.delivered(num_tokens, now=11.0)
    timings = RequestTimings(0.5, 1.5, 0.25, 2.0, 3.0, 4.0, 0.25, 5.0, 6.0, 99.0, 7, transport)
    metrics.ended(times, "stop", 12.0, timings)
    found = samples(metrics)
    for name, seconds, is_there in (
        ("request_queue", 0.5, True),
        ("request_prefill", 1.5, True),
        ("request_first_decode", 4.0, num_tokens > 1),
        ("handoff_last_segment", 2.0, bool(transport)),
        ("handoff_commit", 3.0, bool(transport)),
        ("handoff_announce_to_pull", 5.0, bool(transport)),
        ("handoff_pull", 6.0, bool(transport)),
    ):
        assert found[f"diptych_{name}_seconds_count", ()] == is_there
        assert found[f"diptych_{name}_seconds_sum", ()] == seconds * is_there


def test_links_appear_with_their_sink_and_vanish_with_it() -> None:
    view = FleetWorker(WorkerInfo("w", "w:1", "decode", "decode", "decode-2"))
    view.transfer_stats = (TransferStats("a", "nixl", 640, 0.5, 3, 0), TransferStats("b", "grpc", 1, 0.25, 1, 2))
    views = [view, FleetWorker(WorkerInfo("a", "a:1", "prefill", "prefill", "prefill-1"))]
    metrics = RouterMetrics(lambda: views)
    found = samples(metrics)
    for link, source_name in zip(view.transfer_stats, ("prefill-1", ""), strict=True):  # b has ended
        ends = (("source", link.source), ("source_name", source_name), ("transport", link.transport))
        labels = (*ends, ("worker", "w"), ("worker_name", "decode-2"))
        assert found["diptych_link_bytes_total", labels] == link.num_bytes
        assert found["diptych_link_read_seconds_total", labels] == link.read_s
        assert found["diptych_link_reads_total", labels] == link.num_reads
        assert found["diptych_link_failures_total", labels] == link.num_failed
    views.clear()
    assert not [key for key in samples(metrics) if "link" in key[0]]


def test_workers_appear_as_they_report_and_leave_no_trace() -> None:
    info = WorkerInfo("w", "w:1", "decode", "decode", "decode-2")
    view = FleetWorker(info, is_up=True, num_blocks=10, num_in_flight=2)
    view.take(
        worker_pb2.LoadReport(
            num_running=3,
            num_free_blocks=4,
            num_leased_blocks=1,
            num_handoffs_received=9,
            num_checksum_failures=5,
            num_migrated_out=6,
            num_prefixes_pulled=7,
        )
    )
    views = [view]
    metrics = RouterMetrics(lambda: views)
    labels = (("pool", "decode"), ("role", "decode"), ("worker", "w"), ("worker_name", "decode-2"))
    found = samples(metrics)
    for name, value in (
        ("up", 1),
        ("running", 3),
        ("requests_in_flight", 2),
        ("kv_blocks_used", 6),
        ("kv_blocks_free", 4),
        ("kv_blocks_leased", 1),
        ("handoffs_received_total", 9),
        ("checksum_failures_total", 5),
        ("migrations_out_total", 6),
        ("prefixes_pulled_total", 7),
    ):
        assert found[f"diptych_worker_{name}", labels] == value
    assert not [key for key in found if "expert" in key[0]]
    views.clear()
    assert not [key for key in samples(metrics) if "worker" in key[0]]


def test_experts_of_a_worker() -> None:
    view = FleetWorker(WorkerInfo("w", "w:1", "decode", "decode", "decode-2"), is_up=True)
    view.take(worker_pb2.LoadReport(expert_tokens=[5, 0, 7], expert_imbalance=[0.0, 1.75]))
    found = samples(RouterMetrics(lambda: [view]))
    labels = {"pool": "decode", "role": "decode", "worker": "w", "worker_name": "decode-2"}

    def value(name: str, **of: str) -> float | None:
        return found.get((f"diptych_worker_{name}", tuple(sorted((labels | of).items()))))

    assert [value("expert_tokens_total", expert=str(e)) for e in range(3)] == [5, 0, 7]
    assert [value("expert_imbalance", layer=str(layer)) for layer in range(2)] == [None, 1.75]


def test_drafts_of_a_worker() -> None:
    silent, view = (FleetWorker(WorkerInfo(name, f"{name}:1", "decode", "decode", name), is_up=True) for name in "vw")
    counts = [
        worker_pb2.DraftCounts(method="ngram", num_drafted=9, num_accepted=4),
        worker_pb2.DraftCounts(method="suffix", num_drafted=5, num_accepted=5),
    ]
    failed = worker_pb2.LoadReport(num_draft_failures=3, is_draft_off=True)
    failed.MergeFrom(worker_pb2.LoadReport(drafts=counts, draft_yields=[2, 0, 3], num_draft_tokens_anew=96))
    view.take(failed)
    found = samples(RouterMetrics(lambda: [silent, view]))
    labels = {"pool": "decode", "role": "decode", "worker": "w", "worker_name": "w"}

    def value(name: str, **of: str) -> float | None:
        return found.get((f"diptych_worker_{name}", tuple(sorted((labels | of).items()))))

    assert (value("drafted_tokens_total", method="ngram"), value("drafted_tokens_total", method="suffix")) == (9, 5)
    assert (value("accepted_tokens_total", method="ngram"), value("accepted_tokens_total", method="suffix")) == (4, 5)
    assert [value("verification_tokens_bucket", le=le) for le in ("1.0", "2.0", "3.0", "+Inf")] == [2, 2, 5, 5]
    assert value("draft_tokens_computed_anew_total") == 96
    assert (value("draft_failures_total"), value("draft_off")) == (3, 1)
    assert (value("verification_tokens_count"), value("verification_tokens_sum")) == (5, 2 + 3 * 3)
    assert not [key for key in found if ("worker", "v") in key[1] and ("draft" in key[0] or "verif" in key[0])]


@pytest.mark.parametrize(
    ("level", "outcome", "judged"),
    [
        (Level(1.0, 0.5), "length", "met"),
        (Level(0.9, 0.5), "stop", "missed_ttft"),
        (Level(1.0, 0.4), "stop", "missed_tpot"),
        (Level(0.9, 0.4), "length", "missed_both"),
        (Level(1.0, 0.5), "worker_lost", "failed"),
        (Level(1.0, 0.5), "rate_limit_exceeded", "refused"),
        (Level(1.0, 0.5), "request_aborted", None),
    ],
)
def test_requests_are_counted_by_how_they_met_their_level(level: Level, outcome: str, judged: str | None) -> None:
    metrics = RouterMetrics(list)
    times = RequestTimes(started_at=10.0)
    times.delivered(1, now=11.0)
    times.delivered(2, now=12.0)
    times.last_token_at = 12.0
    metrics.judged(times, RequestLevel(model="chat", tier="flex"), level, outcome)
    found = {labels: n for (name, labels), n in samples(metrics).items() if name == "diptych_level_requests_total"}
    assert found == ({(("model", "chat"), ("outcome", judged), ("tier", "flex")): 1} if judged else {})


def test_a_client_that_left_before_it_read_a_finished_answer_tells_nothing() -> None:
    metrics = RouterMetrics(list)
    metrics.judged(RequestTimes(started_at=10.0), RequestLevel(), Level(1.0, 1.0), "length")
    assert not [labels for name, labels in samples(metrics) if name == "diptych_level_requests_total"]


def test_a_single_token_has_no_time_per_token_to_miss() -> None:
    metrics = RouterMetrics(list)
    times = RequestTimes(started_at=10.0)
    times.delivered(1, now=10.5)
    times.last_token_at = 10.5
    metrics.judged(times, RequestLevel(), Level(1.0, 1e-4), "length")
    assert samples(metrics)["diptych_level_requests_total", (("model", ""), ("outcome", "met"), ("tier", "default"))]


def test_a_refused_request_says_nothing_about_how_long_requests_take() -> None:
    metrics = RouterMetrics(list)
    metrics.began(1)
    metrics.ended(RequestTimes(started_at=1.0), "rate_limit_exceeded", now=1.0)
    found = samples(metrics)
    assert found["diptych_request_seconds_count", ()] == found["diptych_request_queue_seconds_count", ()] == 0
    assert found["diptych_requests_total", (("outcome", "rate_limit_exceeded"),)] == 1
    assert found["diptych_requests_in_flight", ()] == 0
