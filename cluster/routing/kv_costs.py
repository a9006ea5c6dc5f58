"""Estimates of the time in which a worker pulls or computes the KV of a sequence, from load reports. Pure."""

from collections.abc import Iterable

from .fleet import FleetWorker

# Used until a worker has pulled. High: a link that is thought to be slow would never be tried, so never measured.
DEFAULT_LINK_BYTES_S = 1e10
PULL_LATENCY_S = 0.02  # from the offer to the release, without the transfer
# Used until some worker has prefilled. High, so that nothing is moved on a guess.
DEFAULT_PREFILL_TOKENS_S = 20_000.0
MIN_MEASURED_TOKENS = 256
_ALL = ""  # no incarnation; for sources that it has not pulled from


def pull_s(source: FleetWorker, sink: FleetWorker, num_tokens: int) -> float:
    """Seconds in which `sink` pulls the KV of `num_tokens` tokens from `source`."""
    return PULL_LATENCY_S + num_tokens * source.kv_token_bytes / link_bytes_s(source, sink)


def compute_s(worker: FleetWorker, num_tokens: int, workers: Iterable[FleetWorker]) -> float:
    """Seconds in which `worker` prefills `num_tokens` tokens, by the others' speed while its own is not known."""
    return num_tokens / (_prefill_tokens_s([worker]) or _prefill_tokens_s(workers) or DEFAULT_PREFILL_TOKENS_S)


def link_bytes_s(source: FleetWorker, sink: FleetWorker) -> float:
    """Bytes per second at which `sink` pulled from `source` lately; from all its sources while that pair is not
    measured. What was not used for some minutes counts as not measured, so that a slow link is tried again."""
    speeds = sink.link_speeds
    if speeds is None:
        speeds, of_all = sink.recent_links.take(sink.load.links, sink.reported_at, DEFAULT_LINK_BYTES_S)
        speeds[_ALL] = of_all
        sink.link_speeds = speeds
    return speeds.get(source.info.incarnation) or speeds[_ALL]


def _prefill_tokens_s(workers: Iterable[FleetWorker]) -> float | None:
    """Return the harmonic mean of the workers' speeds, of those that have prefilled."""
    speeds: list[float] = []
    for worker in workers:
        load, recent = worker.load, worker.recent_prefill
        if load.num_prefill_tokens >= MIN_MEASURED_TOKENS:
            recent.count(load.num_prefill_tokens, load.prefill_s, worker.reported_at)
            if (speed := recent.known()) is not None:
                speeds.append(speed)
    return len(speeds) / sum(1 / speed for speed in speeds) if speeds else None
