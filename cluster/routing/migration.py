"""Which running sequences move to another worker, and where to. Pure: the fleet and this router's legs -> a Move.

    drain    a worker that drains gives all that decodes there to others, a few at a time
    relief   a worker short of KV blocks would preempt its youngest sequence, and compute it again later: where it is
             cheaper to carry its KV to a worker with room for all of it, it moves

A leg stays where it is if no worker has the blocks that its hand-off reserves (live_handoff.py), or if it has few
tokens to make: it ends as soon itself. A leg that ends before blocks are short is not moved for relief. No ping-pong: a
relief leaves the target with room to spare, and a leg moves for relief once in a while only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...workers.common.role import Role
from ...workers.core.live_handoff import SLACK_BLOCKS, headroom_blocks, offered_tokens
from .fleet import WorkerView
from .kv_costs import compute_s, pull_s

# Of a leg between two moves for relief, and after one that failed: an offer that no sink came for stands so long, and
# a sequence is offered once at a time.
REST_S = 10.0
LASTING_BLOCKS = 2  # of tokens to make: a leg that has no more ends as soon where it is


@dataclass(frozen=True, slots=True)
class MovableLeg:
    handle: int
    worker: str
    num_tokens: int  # whose KV it holds, and the next
    num_remaining: int  # tokens that it may still make
    began_at: float  # seconds: the youngest has the largest
    barred: frozenset[str] = frozenset()  # workers that it is not to go to
    moved_at: float = float("-inf")  # seconds; when it last was to move
    moved_from: str = ""  # where to leave from


@dataclass(frozen=True, slots=True)
class Move:
    handle: int
    target: str


def is_short_of_blocks(worker: WorkerView) -> bool:
    """Its running sequences may need more than it has while one of them moves."""
    return worker.load.num_free_blocks < SLACK_BLOCKS * worker.load.num_running


def drain_move(
    workers: Sequence[WorkerView], legs: Iterable[MovableLeg], num_moving: Mapping[str, int], limit: int, now: float
) -> Move | None:
    """The next leg to leave a worker that drains: who has most to do there. `num_moving` leave it already, at most
    `limit` do at a time."""
    leaving = {w.incarnation: w for w in workers if w.is_draining and num_moving.get(w.incarnation, 0) < limit}
    for leg in sorted(legs, key=lambda g: (-g.num_remaining, g.handle)):
        source = leaving.get(leg.worker)
        has_failed = leg.moved_from == leg.worker and now - leg.moved_at < REST_S
        if source is not None and leg.num_remaining > LASTING_BLOCKS * source.block_size and not has_failed:
            able = [w for w in _able(workers, leg) if _has_room_to_arrive(w, leg, source.block_size)]
            if able:
                return Move(leg.handle, min(able, key=lambda w: (_use(w, leg), w.incarnation)).incarnation)
    return None


def relief(workers: Sequence[WorkerView], source: WorkerView, legs: Iterable[MovableLeg], now: float) -> Move | None:
    """The leg that `source`, short of blocks, is best rid of; None where preempting is as good."""
    rested = [g for g in legs if g.worker == source.incarnation and now - g.moved_at >= REST_S]
    blocks_each = source.load.num_free_blocks // max(source.load.num_running, 1)  # before one has none
    most = max(blocks_each, LASTING_BLOCKS) * source.block_size
    lasting = [g for g in rested if g.num_remaining > most]
    for leg in sorted(lasting, key=lambda g: (-g.began_at, g.handle)):
        able = [w for w in _able(workers, leg) if _has_room_for_all(w, leg)]
        if able:
            target = min(able, key=lambda w: (pull_s(source, w, leg.num_tokens), _use(w, leg), w.incarnation))
            is_cheaper = pull_s(source, target, leg.num_tokens) < compute_s(source, leg.num_tokens, workers)
            return Move(leg.handle, target.incarnation) if is_cheaper else None
    return None


def _able(workers: Iterable[WorkerView], leg: MovableLeg) -> list[WorkerView]:
    needed = leg.num_tokens + leg.num_remaining
    return [
        w
        for w in workers
        if w.is_available
        and w.role is not Role.PREFILL
        and w.max_context_tokens >= needed
        and w.incarnation not in leg.barred | {leg.worker}
    ]


def _blocks_left(worker: WorkerView, num_tokens: int) -> int:
    return worker.num_blocks - worker.used_blocks - -(-num_tokens // worker.block_size)


def _has_room_to_arrive(worker: WorkerView, leg: MovableLeg, block_size: int) -> bool:
    """For what a source with blocks of that size offers: without it the pull would wait for blocks, and so would the
    sequence that it is for."""
    offered = offered_tokens(leg.num_tokens, leg.num_remaining, block_size)
    return _blocks_left(worker, offered) >= headroom_blocks(worker.num_sequences, worker.num_blocks)


def _has_room_for_all(worker: WorkerView, leg: MovableLeg) -> bool:
    """To its end, and what those that run need there, so that the target will not want relief in turn."""
    reserve = SLACK_BLOCKS * (worker.num_sequences + 1)
    return _blocks_left(worker, leg.num_tokens + leg.num_remaining) >= reserve


def _use(worker: WorkerView, leg: MovableLeg) -> float:
    """Fraction of its KV memory that is used with the leg there."""
    return 1 - _blocks_left(worker, leg.num_tokens) / worker.num_blocks
