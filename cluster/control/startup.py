"""Tells what a start still waits for, and why it cannot succeed. Pure: reads a ClusterStatus."""

from ...workers.common.errors import DiptychError, Unavailable, from_wire
from ..common.plurals import count
from .status import ClusterStatus

YOUNG_FAILURES = 3  # in a row, before the cluster was ever ready: another try would fail alike


def why_it_fails(status: ClusterStatus) -> DiptychError | None:
    """The error that ends the start; None while it may still succeed."""
    if status.failure:
        return from_wire(status.failure.error, status.failure.message)
    for pool in status.pools:
        if pool.num_failures >= YOUNG_FAILURES:
            return Unavailable(f"the {pool.name} workers do not start: {pool.last_error}")
    for router in status.routers:
        if router.num_failures >= YOUNG_FAILURES:
            return Unavailable(f"{router.router_id} does not start: {router.last_error}")
    return None


def losses(before: ClusterStatus | None, now: ClusterStatus) -> list[str]:
    """The failures of workers and routers that are new in `now`, a line each."""
    pools = {p.name: (p.last_error, p.num_failures) for p in before.pools} if before else {}
    routers = {r.router_id: (r.last_error, r.num_failures) for r in before.routers} if before else {}
    lines = [
        f"{p.name}: lost {p.last_error}"
        for p in now.pools
        if p.num_failures and pools.get(p.name, ("", 0)) != (p.last_error, p.num_failures)
    ]
    lines += [
        f"lost {r.router_id}: {r.last_error}"
        for r in now.routers
        if r.num_failures and routers.get(r.router_id, ("", 0)) != (r.last_error, r.num_failures)
    ]
    return lines


def missing(status: ClusterStatus) -> str:
    """Return what is not ready yet, and what each of these waits for."""
    parts = [f"{p.num_ready} of {count(p.target, f'{p.name} worker')} ready" for p in status.pools if p.target]
    routers = [r for r in status.routers if r.phase != "ready"]
    parts += [f"{r.router_id} {f'waits for {r.waiting_for}' if r.waiting_for else 'starts'}" for r in routers]
    parts += [f"{w.worker_id} waits for {w.waiting_for}" for w in status.workers if w.waiting_for]
    loading = [w.worker_id for w in status.workers if w.phase == "starting" and not w.waiting_for]
    if loading:
        parts.append(f"{', '.join(loading)} {'load' if len(loading) > 1 else 'loads'} the model")
    return "; ".join(parts)
