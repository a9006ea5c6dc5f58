"""Workers and links of a router as its dashboard shows them. Pure."""

from collections.abc import Iterable

from ...routing.fleet import FleetWorker
from .activity import LostWorker

Json = dict[str, object]


def worker_json(view: FleetWorker) -> Json:
    """Worker with its newest load report. Counts are of sequences, blocks and tokens; counters since its start."""
    load = view.load
    return {
        "id": view.incarnation,
        "name": view.info.name,
        "pool": view.info.pool,
        "role": view.role.value,
        "node": _node(view.info.address),
        "address": view.info.address,
        "state": _state(view),
        "problem": view.problem,
        "num_in_flight": view.num_in_flight,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_waiting_tokens": load.num_waiting_tokens,
        "num_blocks": view.num_blocks,
        "num_used_blocks": view.num_blocks - load.num_free_blocks,
        "num_leased_blocks": load.num_leased_blocks,
        "num_quarantined_blocks": load.num_quarantined_blocks,
        "block_size": view.block_size,
        "prefill_budget": view.prefill_budget,
        "step_tokens": view.step_tokens,
        "num_open_leases": load.num_open_leases,
        "num_late_leases": load.num_late_leases,
        "num_expired_leases": load.num_expired_leases,
        "num_prompt_tokens": load.num_prompt_tokens,
        "num_cached_tokens": load.num_cached_tokens,
        "num_prefill_tokens": load.num_prefill_tokens,
        "num_decode_tokens": load.num_decode_tokens,
        "num_preemptions": load.num_preemptions,
        "num_failed_steps": load.num_failed_steps,
        "num_handoffs_sent": load.num_handoffs_sent,
        "num_handoffs_received": load.num_handoffs_received,
        "num_handoffs_failed": load.num_handoffs_failed,
    }


def lost_json(lost: LostWorker) -> Json:
    """Worker that is gone."""
    info = lost.info
    return {
        "id": info.incarnation,
        "name": info.name,
        "pool": info.pool,
        "role": info.role,
        "node": _node(info.address),
        "address": info.address,
        "state": "lost",
        "problem": lost.reason,
    }


def links_json(views: Iterable[FleetWorker]) -> list[Json]:
    """Transfers of KV, by reader and source: counters since the reader's start."""
    return [
        {
            "worker": view.incarnation,
            "source": stats.source,
            "transport": stats.transport,
            "num_bytes": stats.num_bytes,
            "read_s": round(stats.read_s, 4),
            "num_reads": stats.num_reads,
            "num_failed": stats.num_failed,
        }
        for view in views
        for stats in view.transfer_stats
    ]


def _state(view: FleetWorker) -> str:
    if view.is_up:
        return "draining" if view.is_draining or not view.is_listed else "up"
    return "down" if view.problem else "connecting"


def _node(address: str) -> str:
    """Host of `host:port`."""
    return address.rpartition(":")[0].strip("[]")
