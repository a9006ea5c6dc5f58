"""Workers that start, serve and end together, because they share the experts of a mixture (`data_parallel`). Pure.

A gang is what a pool counts. Most are of one worker, which has the gang's id; the others' have a number each behind it:
"decode-3" is "decode-3.0", "decode-3.1", ...
"""

from collections.abc import Iterable, Sequence

from .plan import Phase, WorkerView

PHASES = (Phase.STOPPING, Phase.DRAINING, Phase.STARTING, Phase.READY)  # a gang's is the first that a member is in


def members(gang_id: str, size: int) -> list[str]:
    """The ids of its workers, by rank."""
    return [gang_id] if size == 1 else [f"{gang_id}.{rank}" for rank in range(size)]


def gang_of(worker_id: str) -> str:
    return worker_id.partition(".")[0]


def rank_of(worker_id: str) -> int:
    return int(worker_id.partition(".")[2] or 0)


def gangs_of(workers: Iterable[WorkerView]) -> list[WorkerView]:
    """Each as if it were one worker."""
    found: dict[str, list[WorkerView]] = {}
    for worker in workers:
        found.setdefault(gang_of(worker.worker_id), []).append(worker)
    return [_as_one(gang_id, views) for gang_id, views in found.items()]


def _as_one(gang_id: str, views: Sequence[WorkerView]) -> WorkerView:
    phases = {view.phase for view in views}
    phase = next(phase for phase in PHASES if phase in phases)
    num_requests = sum(view.num_requests for view in views)
    is_draining, is_silent = any(view.is_draining for view in views), any(view.is_silent for view in views)
    return WorkerView(gang_id, views[0].pool, phase, num_requests, is_draining, is_silent)
