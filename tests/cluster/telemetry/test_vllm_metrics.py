"""Metrics by vLLM's names: the router's own numbers."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from diptych.cluster.common.timings import RequestTimes
from diptych.cluster.routing.fleet import FleetWorker, WorkerInfo
from diptych.cluster.routing.metrics import RouterMetrics
from diptych.cluster.telemetry.vllm_metrics import VllmMetrics
from diptych.proto import worker_pb2

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def page(views: Sequence[FleetWorker], metrics: RouterMetrics | None = None) -> Samples:
    own = metrics or RouterMetrics(lambda: views)
    registry = CollectorRegistry()
    registry.register(VllmMetrics(own.families, "llama"))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert all(family.documentation and family.type != "unknown" for family in families)
    found: Samples = {}
    for sample in (sample for family in families for sample in family.samples):
        assert (sample.labels.pop("model_name"), sample.labels.pop("engine")) == ("llama", "0")
        found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def worker(name: str, **load: object) -> FleetWorker:
    view = FleetWorker(WorkerInfo(name, f"{name}:1", "mixed", "mixed", name), is_up=True, num_blocks=100)
    view.take(worker_pb2.LoadReport(**load))  # type: ignore[arg-type]
    return view


def test_numbers_of_workers_are_summed() -> None:
    drafts = [worker_pb2.DraftCounts(method=method, num_drafted=10, num_accepted=4) for method in ("ngram", "suffix")]
    one = worker("a", num_running=3, num_waiting=1, num_free_blocks=75, num_prompt_tokens=50, num_cached_tokens=20)
    two = worker("b", num_running=4, num_waiting=2, num_free_blocks=25, num_preemptions=6, drafts=drafts)
    found = page([one, two])
    for name, value in (
        ("num_requests_running", 7),
        ("num_requests_waiting", 3),
        ("kv_cache_usage_perc", 0.5),
        ("num_preemptions_total", 6),
        ("prefix_cache_queries_total", 50),
        ("prefix_cache_hits_total", 20),
        ("spec_decode_num_draft_tokens_total", 20),
        ("spec_decode_num_accepted_tokens_total", 8),
    ):
        assert found[f"vllm:{name}", ()] == value, name


def test_what_endpoint_pickers_read_is_there() -> None:
    """Names, types and labels of the Gateway API Inference Extension's proposal 003, "Model Server Protocol"."""
    registry = CollectorRegistry()
    one, two = worker("a", num_waiting=2, num_free_blocks=50), worker("b", num_running=1, num_free_blocks=100)
    one.block_size, two.block_size = 32, 16
    registry.register(VllmMetrics(RouterMetrics(lambda: [one, two]).families, "llama"))
    families = {f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())}
    for name, value in (("num_requests_waiting", 2), ("num_requests_running", 1), ("kv_cache_usage_perc", 0.25)):
        [sample] = families[f"vllm:{name}"].samples
        assert (families[f"vllm:{name}"].type, sample.value) == ("gauge", value)
    [sample] = families["vllm:cache_config_info"].samples
    assert (sample.labels["block_size"], sample.labels["num_gpu_blocks"], sample.value) == ("16", "200", 1)
    registry = CollectorRegistry()
    registry.register(VllmMetrics(RouterMetrics(list).families, "llama"))
    assert b"vllm:cache_config_info{" not in generate_latest(registry), "before the first worker nothing is known"


def test_numbers_of_requests_are_the_routers_own() -> None:
    metrics = RouterMetrics(list)
    metrics.began(num_prompt_tokens=7)
    times = RequestTimes(10.0)
    metrics.delivered(times, 1, now=11.0)
    metrics.delivered(times, 2, now=11.25)
    metrics.ended(times, "stop", now=12.0)
    for outcome in ("length", "request_aborted", "worker_lost", "deadline_exceeded"):
        metrics.began(1)
        metrics.ended(RequestTimes(1.0), outcome, now=2.0)
    found = page([], metrics)
    assert (found["vllm:prompt_tokens_total", ()], found["vllm:generation_tokens_total", ()]) == (11, 3)
    assert found["vllm:kv_cache_usage_perc", ()] == 0
    for name, count, seconds in (
        ("time_to_first_token", 1, 1.0),
        ("inter_token_latency", 1, 0.25),
        ("e2e_request_latency", 5, 6.0),
    ):
        assert found[f"vllm:{name}_seconds_count", ()] == count
        assert found[f"vllm:{name}_seconds_sum", ()] == seconds
        assert found[f"vllm:{name}_seconds_bucket", (("le", "+Inf"),)] == count
    reasons = {labels[0][1]: value for (name, labels), value in found.items() if name == "vllm:request_success_total"}
    assert reasons == {"stop": 1, "length": 1, "abort": 1, "error": 2}
