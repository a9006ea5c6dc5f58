"""What Prometheus reads."""

from prometheus_client.parser import text_string_to_metric_families

from diptych.cluster.fleet import WorkerInfo, WorkerView
from diptych.cluster.metrics import RequestTimes, RouterMetrics
from diptych.proto import worker_pb2


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


def test_a_request_that_never_reached_a_worker_waited_all_its_life() -> None:
    metrics = RouterMetrics(list)
    metrics.began(1)
    metrics.ended(RequestTimes(started_at=1.0), "service_unavailable", now=4.0)
    assert samples(metrics)["diptych_request_queue_seconds_sum", ()] == 3.0


def test_workers_appear_as_they_report_and_leave_no_trace() -> None:
    view = WorkerView(WorkerInfo("w", "w:1", "decode", "decode"), is_up=True, num_blocks=10, num_in_flight=2)
    view.load = worker_pb2.LoadReport(num_running=3, num_free_blocks=4, num_leased_blocks=1, num_handoffs_received=9)
    views = [view]
    metrics = RouterMetrics(lambda: views)
    labels = (("pool", "decode"), ("role", "decode"), ("worker", "w"))
    found = samples(metrics)
    for name, value in (
        ("up", 1),
        ("running", 3),
        ("requests_in_flight", 2),
        ("kv_blocks_used", 6),
        ("kv_blocks_free", 4),
        ("kv_blocks_leased", 1),
        ("handoffs_received_total", 9),
    ):
        assert found[f"diptych_worker_{name}", labels] == value
    views.clear()
    assert not [key for key in samples(metrics) if "worker" in key[0]]
