"""Metrics of a router under the names of vLLM (v1), so that dashboards and autoscalers made for it work.

They are the same numbers as the router's own, read at scrape time: those of a request as they are, those of a worker
summed over the workers. The label `model_name` is the model's name; vLLM's label `engine` is always 0.
Source: vLLM's documentation, "Production Metrics".
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...workers.common.errors import RequestAborted
from ...workers.common.request import FinishReason

# By the names of the router's own metrics.
RENAMED = {
    "diptych_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "diptych_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "diptych_request_seconds": "vllm:e2e_request_latency_seconds",
    "diptych_request_queue_seconds": "vllm:request_queue_time_seconds",
    "diptych_request_prefill_seconds": "vllm:request_prefill_time_seconds",
    "diptych_prompt_tokens": "vllm:prompt_tokens",
    "diptych_generation_tokens": "vllm:generation_tokens",
}
SUMMED = {
    "diptych_worker_running": "vllm:num_requests_running",
    "diptych_worker_waiting": "vllm:num_requests_waiting",
    "diptych_worker_preemptions": "vllm:num_preemptions",
    "diptych_worker_prompt_tokens": "vllm:prefix_cache_queries",
    "diptych_worker_cached_tokens": "vllm:prefix_cache_hits",
    "diptych_worker_drafted_tokens": "vllm:spec_decode_num_draft_tokens",
    "diptych_worker_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
}
BLOCKS, USED = "diptych_worker_kv_blocks", "diptych_worker_kv_blocks_used"
USAGE = "vllm:kv_cache_usage_perc"
BLOCK_SIZE, CACHE_CONFIG = "diptych_worker_kv_block_tokens", "vllm:cache_config_info"
OUTCOMES, SUCCESS = "diptych_requests", "vllm:request_success"
_REASONS = {FinishReason.STOP.value: "stop", FinishReason.LENGTH.value: "length", RequestAborted.code: "abort"}
_ERROR = "error"


class VllmMetrics(Collector):
    """`families`: the router's own metrics."""

    def __init__(self, families: Callable[[], Iterable[Metric]], model_name: str) -> None:
        self._families = families
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        own = {family.name: family for family in self._families()}
        for name, alias in RENAMED.items():
            yield self._renamed(own[name], alias)
        for name, alias in SUMMED.items():
            yield self._one(own[name], alias, _total(own[name]))
        num_blocks = _total(own[BLOCKS])
        yield self._one(own[USED], USAGE, _total(own[USED]) / num_blocks if num_blocks else 0.0)
        yield self._outcomes(own[OUTCOMES])
        yield self._cache_config(own[BLOCK_SIZE], num_blocks)

    def _renamed(self, family: Metric, alias: str) -> Metric:
        made = Metric(alias, family.documentation, family.type)
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                name = alias + sample.name.removeprefix(family.name)
                made.add_sample(name, self._labels | sample.labels, sample.value)
        return made

    def _one(self, family: Metric, alias: str, value: float) -> Metric:
        made = Metric(alias, family.documentation, family.type)
        made.add_sample(alias + ("_total" if family.type == "counter" else ""), self._labels, value)
        return made

    def _cache_config(self, sizes: Metric, num_blocks: float) -> Metric:
        """Information that is in the labels. Where workers differ, the size is that of the smallest blocks."""
        made = Metric(CACHE_CONFIG, "KV blocks: tokens in one, and their number over all workers", "gauge")
        if known := [int(sample.value) for sample in sizes.samples]:
            labels = {"block_size": str(min(known)), "num_gpu_blocks": str(int(num_blocks))}
            made.add_sample(CACHE_CONFIG, self._labels | labels, 1.0)
        return made

    def _outcomes(self, family: Metric) -> Metric:
        made = Metric(SUCCESS, family.documentation, family.type)
        for reason, num in _by_reason(family).items():
            made.add_sample(f"{SUCCESS}_total", self._labels | {"finished_reason": reason}, num)
        return made


def _by_reason(family: Metric) -> Mapping[str, float]:
    """Requests that ended, by vLLM's reasons; errors are one."""
    found = dict.fromkeys((*_REASONS.values(), _ERROR), 0.0)
    for sample in family.samples:
        if sample.name.endswith("_total"):
            found[_REASONS.get(sample.labels["outcome"], _ERROR)] += sample.value
    return found


def _total(family: Metric) -> float:
    """Sum over the workers."""
    return sum(sample.value for sample in family.samples if not sample.name.endswith("_created"))
