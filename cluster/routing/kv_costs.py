"""Estimates of the time in which a worker pulls or computes the KV of a sequence, from load reports. Pure."""

from collections.abc import Iterable

from .fleet import FleetWorker

# Used until a worker has pulled: the speed of gRPC between two processes of one machine.
DEFAULT_LINK_BYTES_S = 1e9
PULL_LATENCY_S = 0.02  # from the offer to the release, without the transfer
MIN_MEASURED_BYTES = 1 << 20
# Used until some worker has prefilled. High, so that nothing is moved on a guess.
DEFAULT_PREFILL_TOKENS_S = 20_000.0
MIN_MEASURED_TOKENS = 256
_ALL = ""  # no incarnation


def pull_s(source: FleetWorker, sink: FleetWorker, num_tokens: int) -> float:
    """Seconds in which `sink` pulls the KV of `num_tokens` tokens from `source`."""
    return PULL_LATENCY_S + num_tokens * source.kv_token_bytes / link_bytes_s(source, sink)


def compute_s(worker: FleetWorker, num_tokens: int, workers: Iterable[FleetWorker]) -> float:
    """Seconds in which `worker` prefills `num_tokens` tokens, by the others' speed while its own is not known."""
    return num_tokens / (_prefill_tokens_s([worker]) or _prefill_tokens_s(workers) or DEFAULT_PREFILL_TOKENS_S)


def link_bytes_s(source: FleetWorker, sink: FleetWorker) -> float:
    """Bytes per second at which `sink` pulled from `source`; from all its sources while that pair is not measured."""
    speeds = sink.link_speeds
    if speeds is None:
        speeds = sink.link_speeds = _link_speeds(sink)
    return speeds.get(source.info.incarnation) or speeds[_ALL]


def _link_speeds(sink: FleetWorker) -> dict[str, float]:
    """Speed of each link that is measured, by source, and that of all under _ALL."""
    speeds: dict[str, float] = {}
    num_bytes, seconds = 0, 0.0
    for link in sink.load.links:
        if link.num_bytes >= MIN_MEASURED_BYTES and link.read_s > 0:
            speeds.setdefault(link.incarnation, link.num_bytes / link.read_s)
            num_bytes, seconds = num_bytes + link.num_bytes, seconds + link.read_s
    speeds[_ALL] = num_bytes / seconds if seconds else DEFAULT_LINK_BYTES_S
    return speeds


def _prefill_tokens_s(workers: Iterable[FleetWorker]) -> float | None:
    loads = [w.load for w in workers]
    num_tokens, seconds = sum(load.num_prefill_tokens for load in loads), sum(load.prefill_s for load in loads)
    return num_tokens / seconds if num_tokens >= MIN_MEASURED_TOKENS and seconds > 0 else None
