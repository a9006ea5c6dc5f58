"""Decides which running requests move to another worker, and to which. Pure: fleet and requests in, a Move out.

    drain    a worker that drains gives every request that decodes there to others, a few at a time; so does one whose
             prefill budget became a whole step's, with those that came before
    relief   a worker short of KV blocks would preempt its youngest sequence and compute it again later: where moving
             its KV to a worker with room for all of it costs less, the sequence moves

A request stays where it is if no worker with the same weights has the blocks that its hand-off reserves
(live_handoff.py), or if it has few tokens left: it ends as soon there. For relief, a request moves only if it outlasts
the free blocks, the target keeps room to spare, and the request did not move for relief in the last REST_S seconds: so
none moves back and forth."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ...workers.common.role import Role
from ...workers.core.live_handoff import SLACK_BLOCKS, headroom_blocks, offered_tokens
from .fleet import FleetWorker
from .kv_costs import compute_s, pull_s

# Least seconds between two moves of a request for relief, or after a failed one: so long an offer without a sink
# stands, and a sequence has one offer at a time.
REST_S = 10.0
NEVER: Mapping[str, float] = MappingProxyType({})  # no worker's budget has changed
LASTING_BLOCKS = 2  # a request with fewer blocks of tokens to make ends as soon where it is


@dataclass(frozen=True, slots=True)
class MovableRequest:
    """Worker request that decodes and may move."""

    handle: int
    worker: str
    num_tokens: int  # tokens whose KV it holds, and the next one
    num_remaining: int  # tokens that it may still make
    began_at: float  # seconds; largest for the youngest
    excluded: frozenset[str] = frozenset()  # workers that it must not move to
    moved_at: float = float("-inf")  # seconds; start of its last move
    moved_from: str = ""  # source of its last move


@dataclass(frozen=True, slots=True)
class Move:
    """Decision to move a worker request to another worker."""

    handle: int
    target: str


def is_short_of_blocks(worker: FleetWorker) -> bool:
    """Return whether its running sequences may need more blocks than are free while one of them moves."""
    return worker.load.num_free_blocks < SLACK_BLOCKS * worker.load.num_running


def drain_move(
    workers: Sequence[FleetWorker],
    requests: Iterable[MovableRequest],
    num_moving: Mapping[str, int],
    limit: int,
    now: float,
    prefill_since: Mapping[str, float] = NEVER,
) -> Move | None:
    """Next request to leave a worker that drains, or that only prefills since the time in `prefill_since` (s): the one
    with most tokens left. `num_moving`: requests that leave each worker already; `limit`: most at a time."""
    leaving = {
        w.incarnation: w
        for w in workers
        if (w.is_draining or w.incarnation in prefill_since) and num_moving.get(w.incarnation, 0) < limit
    }
    for request in sorted(requests, key=lambda g: (-g.num_remaining, g.handle)):
        source = leaving.get(request.worker)
        if source is not None and not source.is_draining and request.began_at > prefill_since[request.worker]:
            continue
        has_failed = request.moved_from == request.worker and now - request.moved_at < REST_S
        if source is not None and request.num_remaining > LASTING_BLOCKS * source.block_size and not has_failed:
            able = [w for w in _able(workers, source, request) if _has_room_to_arrive(w, request, source.block_size)]
            if able:
                return Move(request.handle, min(able, key=lambda w: (_use(w, request), w.incarnation)).incarnation)
    return None


def relief(
    workers: Sequence[FleetWorker], source: FleetWorker, requests: Iterable[MovableRequest], now: float
) -> Move | None:
    """Request that should leave `source`, which is short of blocks; None where preempting costs no more."""
    rested = [g for g in requests if g.worker == source.incarnation and now - g.moved_at >= REST_S]
    blocks_each = source.load.num_free_blocks // max(source.load.num_running, 1)  # until one has none
    most = max(blocks_each, LASTING_BLOCKS) * source.block_size
    lasting = [g for g in rested if g.num_remaining > most]
    for request in sorted(lasting, key=lambda g: (-g.began_at, g.handle)):
        able = [w for w in _able(workers, source, request) if _has_room_for_all(w, request)]
        if able:
            target = min(able, key=lambda w: (pull_s(source, w, request.num_tokens), _use(w, request), w.incarnation))
            is_cheaper = pull_s(source, target, request.num_tokens) < compute_s(source, request.num_tokens, workers)
            return Move(request.handle, target.incarnation) if is_cheaper else None
    return None


def _able(workers: Iterable[FleetWorker], source: FleetWorker, request: MovableRequest) -> list[FleetWorker]:
    needed = request.num_tokens + request.num_remaining
    return [
        w
        for w in workers
        if w.is_available
        and w.revision == source.revision
        and w.role is not Role.PREFILL
        and w.max_context_tokens >= needed
        and w.incarnation not in request.excluded | {request.worker}
    ]


def _blocks_left(worker: FleetWorker, num_tokens: int) -> int:
    return worker.num_blocks - worker.used_blocks - -(-num_tokens // worker.block_size)


def _has_room_to_arrive(worker: FleetWorker, request: MovableRequest, block_size: int) -> bool:
    """Return whether `worker` has the blocks for what a source with blocks of that size offers: otherwise the pull, and
    the sequence, would wait for blocks."""
    offered = offered_tokens(request.num_tokens, request.num_remaining, block_size)
    return _blocks_left(worker, offered) >= headroom_blocks(worker.num_sequences, worker.num_blocks)


def _has_room_for_all(worker: FleetWorker, request: MovableRequest) -> bool:
    """Return whether `worker` has the blocks for the request until its end and for its own sequences, so that it does
    not need relief itself."""
    reserve = SLACK_BLOCKS * (worker.num_sequences + 1)
    return _blocks_left(worker, request.num_tokens + request.num_remaining) >= reserve


def _use(worker: FleetWorker, request: MovableRequest) -> float:
    """Fraction of the worker's KV memory that is used with the request there."""
    return 1 - _blocks_left(worker, request.num_tokens) / worker.num_blocks
