"""Chooses the workers of a request. Pure: fleet, facts of the request, contents of the prefix caches -> Route.

Once workers have measured their steps, the route is taken by which the fewest requests are expected to miss their
service level (prediction.py). Until then, and where settings say so, roles decide:

    prefill worker   the fewest tokens to wait for: queued there, its own uncached ones, and the running sequences'
    decode worker    the least used KV memory after taking the sequence
    one alone        a mixed worker that is the best to prefill and to decode; for one token, the prefill worker;
                     whoever is left

Roles are preferences: with no worker of one role left, the other role does its work.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from heapq import nsmallest
from itertools import permutations, product

from ...workers.common.errors import ConfigError, Unavailable
from ...workers.common.role import Role
from ..common.config import ClusterConfig
from ..common.prediction import (
    FleetCosts,
    Level,
    WorkerTimes,
    decode_harm,
    decode_times,
    miss_probability,
    prefill_harm,
    prefill_s,
    prompt_misses,
    tpot_miss,
    tpot_s,
    ttft_s,
)
from .actions import PrefixSource, RequestFacts, Route
from .fleet import FleetWorker
from .kv_costs import PULL_LATENCY_S, compute_s, pull_s

NUM_COMPARED = 3  # workers for each part of a route
NUM_SAMPLED = 8
HANDOFF_MISSES = 0.2  # that a hand-off must spare: it takes time of both workers that is not predicted
NEARLY = 0.0005  # expected misses by which predictions differ of themselves
ROUNDING = 1e-9  # more than sums of misses differ by rounding
TIME_WEIGHT = 0.005  # misses that a time as long as its level counts as
ANSWER_TOKENS = 64  # of an answer: few are as long as they may be
SEQUENCE_TOKENS = 8  # to compute, that weigh as much as a running sequence when queues are compared
SPLIT_TOKENS = 2048  # of a prompt that may move inside it
PULL_GAIN = 1.5  # a prefix is pulled where computing it takes longer by this factor


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Settings of a router."""

    predict: bool = False  # choose routes by predicted times, once workers have measured their steps; else by roles
    ttft_s: float = 1.0  # service level
    tpot_s: float = 0.1
    max_in_flight: int = 1024  # sequences at one router
    max_attempts: int = 3  # of one request when workers fail
    worker_timeout_s: float = 5.0  # a worker that sends nothing for this time is lost
    hello_timeout_s: float = 5.0
    no_worker_wait_s: float = 30.0  # how long a request waits for a worker
    may_be_empty: bool = False  # workers leave while there are no requests, and are started for those that wait
    migrate: bool = True  # move running sequences from workers that drain or run short of KV memory
    max_migrations: int = 4  # from one worker at a time
    split_prompts: bool = False  # let two workers compute a long prompt, where that is predicted to spare misses
    pull_prefixes: bool = True  # cached by another worker, where that is faster than to compute them
    reconnect_s: float = 0.1  # doubles after each failure, up to max_reconnect_s
    max_reconnect_s: float = 2.0

    @classmethod
    def of(cls, config: ClusterConfig) -> "RoutingConfig":
        """Take a router's settings from those of its cluster."""
        router, level = config.router, config.service_level
        return cls(
            predict=router.predict,
            ttft_s=level.ttft_s,
            tpot_s=level.tpot_s,
            max_in_flight=router.max_requests,
            max_attempts=router.max_attempts,
            worker_timeout_s=router.worker_timeout_s,
            no_worker_wait_s=config.worker_wait_s,
            may_be_empty=config.pools.may_be_empty,
            migrate=router.migrate,
            split_prompts=router.split_prompts,
            pull_prefixes=router.pull_prefixes,
        )

    @property
    def level(self) -> Level:
        """Service level of requests that ask for none."""
        return Level(self.ttft_s, self.tpot_s)

    def validate(self) -> None:
        """Raise ConfigError for an impossible value; the error names the setting."""
        for name in ("max_in_flight", "max_attempts", "max_migrations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (f.name for f in fields(self) if f.name.endswith("_s")):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")


def choose(
    fleet: Mapping[str, FleetWorker], facts: RequestFacts, config: RoutingConfig, costs: FleetCosts | None = None
) -> Route:
    """Choose a route. fleet: by incarnation; costs: of the workers' steps; None: roles decide. Raises Unavailable where
    no worker can take the request."""
    if facts.group_route is not None:
        route = _group_route(facts.group_route, list(fleet.values()), facts)
        if route is not None:
            return route  # the worker computes or pulls the prompt once for both
    route = None
    if config.predict and costs is not None and costs.are_known:
        route = _predicted_route(fleet, facts, config, costs)
    route = route or _choose_workers(list(fleet.values()), facts)
    if not (config.pull_prefixes and facts.cached_tokens and facts.may_hand_off) or route.move_at is not None:
        return route
    prefix = choose_prefix(fleet, facts, route.prefill or route.decode)
    return route if prefix is None else replace(route, prefix=prefix)


def choose_prefix(fleet: Mapping[str, FleetWorker], facts: RequestFacts, worker: str) -> PrefixSource | None:
    """Best worker to pull the beginning of the prompt from; None: `worker` computes it."""
    sink, num_held = fleet[worker], facts.cached_tokens.get(worker, 0)
    token_s: float | None = None  # of computing a token there
    best, best_saved_s = None, 0.0
    for name, num_cached in facts.cached_tokens.items():
        if num_cached <= num_held or (source := fleet.get(name)) is None or source is sink or not source.is_available:
            continue
        # In whole blocks of the source. The last token's logits have to be computed.
        num_tokens = min(num_cached, facts.num_tokens - 1) // source.block_size * source.block_size
        num_new = num_tokens - num_held
        if num_new <= 0 or (name, worker) in facts.failed_pairs:
            continue
        if token_s is None:
            token_s = compute_s(sink, 1, fleet.values())
        if num_new * token_s <= best_saved_s:
            continue
        saved_s = num_new * token_s - PULL_GAIN * pull_s(source, sink, num_new)
        if saved_s > best_saved_s:
            best, best_saved_s = PrefixSource(name, num_tokens), saved_s
    return best


def _group_route(first: Route, workers: Sequence[FleetWorker], facts: RequestFacts) -> Route | None:
    """Route of another completion of the same prompt as `first`, if its workers are available and have room: the prompt
    is then computed once."""
    source, sink = first.prefill, first.decode
    able = {w.incarnation: w for w in _able(workers, facts) if w.incarnation not in facts.excluded}
    if sink not in able or able[sink].is_full(facts.num_tokens):
        return None
    if source is not None and (source not in able or not facts.may_hand_off or (source, sink) in facts.failed_pairs):
        return None
    if first.move_at is not None:
        return Route(None, sink)  # it waits there for the same prompt
    return Route(source, sink)


def _choose_workers(workers: Sequence[FleetWorker], facts: RequestFacts) -> Route:
    able = _able(workers, facts)
    if not able:
        raise _unavailable(workers)
    able = [w for w in able if w.incarnation not in facts.excluded] or able
    prefillers = [w for w in able if w.role is not Role.DECODE]
    decoders = [w for w in able if w.role is not Role.PREFILL]
    if not prefillers or not decoders or not facts.may_hand_off:
        return Route(None, _best_to_prefill(decoders or prefillers, facts))
    if facts.max_new_tokens <= 1:
        return Route(None, _best_to_prefill(prefillers, facts))
    source = _best_to_prefill(prefillers, facts)
    sinks = [w for w in _sinks_of(source, decoders) if (source, w.incarnation) not in facts.failed_pairs]
    sink = _best_to_decode(sinks, facts) if sinks else source
    return Route(None, sink) if sink == source else Route(source, sink)


# A worker; its times; the time that the prompt takes there, s; the misses that it means for TTFT, one more where the
# worker is full; TTFT as a share of its level; the probability that this is missed; whether the worker is full.
_Candidate = tuple[FleetWorker, WorkerTimes, float, float, float, float, bool]


def _predicted_route(
    fleet: Mapping[str, FleetWorker], facts: RequestFacts, config: RoutingConfig, costs: FleetCosts
) -> Route | None:
    """Choose, of the routes of one worker and of those of two that are best for their parts, the one by which the
    fewest requests are expected to miss their level; None where none of these workers can take the request."""
    level = facts.level or config.level
    able = _able(_sample(fleet, facts), facts)
    if facts.excluded:
        able = [w for w in able if w.incarnation not in facts.excluded]
    if not able:
        return None
    candidates: list[_Candidate] = []
    num_tokens, cached, num_held = facts.num_tokens, facts.cached_tokens, 0
    for w in able:
        times = w.known_times or w.times(costs, config.level)
        if cached:
            num_held = facts.held_tokens(w.info.incarnation)
        own_s, ttft, missed = prompt_misses(times, num_held, num_tokens, level.ttft_s)
        is_full = w.is_full(num_tokens)
        candidates.append((w, times, own_s, missed + is_full + TIME_WEIGHT * ttft, ttft, missed, is_full))
    near, fewest = _nearly_best(candidates, facts, level)
    if fewest > HANDOFF_MISSES and facts.max_new_tokens > 1 and facts.may_hand_off:
        limit, split = fewest - HANDOFF_MISSES, None
        if config.split_prompts and facts.may_split and num_tokens >= SPLIT_TOKENS:
            limit, split = _predicted_split(candidates, facts, level, limit)
        handed_off = _predicted_handoff(candidates, facts, level, limit) or split
        if handed_off is not None:
            return handed_off
    return Route(None, _least_busy([candidates[i] for i in near], facts).incarnation)


def _nearly_best(candidates: Sequence[_Candidate], facts: RequestFacts, level: Level) -> tuple[list[int], float]:
    """Find the workers that are nearly the best to do all of the request, in their order, and the misses expected of
    the best. A worker whose least misses are too many is not looked at further."""
    num_tokens, decodes = facts.num_tokens, facts.max_new_tokens > 1
    fewest, found = math.inf, []
    least = [misses + times.least_harm if decodes else misses for _, times, _, misses, *_ in candidates]
    for i in sorted(range(len(least)), key=least.__getitem__):
        if least[i] >= fewest + NEARLY + ROUNDING:
            break
        _, times, own_s, _, ttft, missed, is_full = candidates[i]
        tpot, harm = decode_times(times, own_s, num_tokens) if decodes else (0.0, prefill_harm(times, own_s))
        tpot /= level.tpot_s
        own = 1 - (1 - missed) * (1 - tpot_miss(times, tpot))
        misses = own + harm + is_full + TIME_WEIGHT * (ttft + tpot)
        found.append((i, misses))
        fewest = min(fewest, misses)
    return sorted([i for i, misses in found if misses < fewest + NEARLY]), fewest


def _predicted_handoff(
    candidates: Sequence[_Candidate], facts: RequestFacts, level: Level, fewest: float
) -> Route | None:
    """Choose the best route of two workers, of those that are best for their parts; None where at least `fewest` misses
    are expected of each."""

    def misses_of_sink(i: int) -> float:
        times, is_full = sinks_times[i], candidates[i][-1]
        new_tpot_s, harm = decode_times(times, 0.0, facts.num_tokens)
        tpot = new_tpot_s / level.tpot_s
        return tpot_miss(times, tpot) + harm + is_full + TIME_WEIGHT * tpot

    def misses_of_source(i: int) -> float:
        _, times, own_s, misses, *_ = candidates[i]
        return misses + prefill_harm(times, own_s)

    sinks_times = [t.as_sink or t for _, t, *_ in candidates]
    least = [
        (t.least_misses if level.tpot_s <= t.goal_s else t.least_harm) + candidate[-1]
        for t, candidate in zip(sinks_times, candidates, strict=True)
    ]
    sinks = _least_misses(least, misses_of_sink, fewest)
    if not sinks:
        return None
    sources = _least_misses([c[3] for c in candidates], misses_of_source, fewest - sinks[0][0])
    best = None
    for (a, i), (b, j) in product(sources, sinks):
        if a + b >= fewest or i == j:
            continue
        source, sink = candidates[i][0], candidates[j][0]
        if facts.failed_pairs and (source.incarnation, sink.incarnation) in facts.failed_pairs:
            continue
        handoff_s = pull_s(source, sink, facts.num_tokens) / min(facts.max_new_tokens, ANSWER_TOKENS)
        misses = a + b + miss_probability(handoff_s / level.tpot_s)
        if misses < fewest:
            best, fewest = Route(source.incarnation, sink.incarnation), misses
    return best


def _least_misses(least: Sequence[float], misses_of: Callable[[int], float], limit: float) -> list[tuple[float, int]]:
    """Find the NUM_COMPARED with the fewest misses, in that order, of those that may have fewer than `limit`. `least`:
    what their misses are at least, so that only some have to be predicted."""
    found: list[tuple[float, int]] = []
    for i in sorted(range(len(least)), key=least.__getitem__):
        if least[i] >= limit + ROUNDING:
            break
        found.append((misses_of(i), i))
        if len(found) >= NUM_COMPARED:
            found.sort()
            del found[NUM_COMPARED:]
            limit = min(limit, found[-1][0])
    return sorted(found)


def _predicted_split(
    candidates: Sequence[_Candidate], facts: RequestFacts, level: Level, fewest: float
) -> tuple[float, Route | None]:
    """Choose the best route that moves inside the prompt, of the workers that are best for prompts: the misses that are
    expected of it, and the route; or `fewest` and None where at least so many are expected of each."""
    best, num_tokens = None, facts.num_tokens
    near = sorted(range(len(candidates)), key=lambda i: (candidates[i][3], i))[:NUM_COMPARED]
    for (source, from_, *_, from_full), (sink, to, *_, to_full) in permutations([candidates[i] for i in near], 2):
        held = facts.held_tokens(source.incarnation)
        if from_full or to_full or (source.incarnation, sink.incarnation) in facts.failed_pairs:
            continue
        for move_at in split_points(from_, to, held, num_tokens, source.block_size):
            own_s = prefill_s(from_, held, move_at)
            rest_s = prefill_s(to, max(move_at, facts.held_tokens(sink.incarnation)), num_tokens)
            pulled_s = max(ttft_s(from_, own_s), pull_s(source, sink, move_at - held)) + PULL_LATENCY_S
            ttft = (max(pulled_s, ttft_s(to, 0.0)) + rest_s * to.stretch) / level.ttft_s
            tpot = tpot_s(to, 0.0, num_tokens) / level.tpot_s
            misses = 1 - (1 - miss_probability(ttft)) * (1 - tpot_miss(to, tpot)) + TIME_WEIGHT * (ttft + tpot)
            misses += prefill_harm(from_, own_s) + decode_harm(to, tpot_s(to, rest_s, num_tokens))
            if misses < fewest:
                fewest, best = misses, Route(source.incarnation, sink.incarnation, None, move_at)
    return fewest, best


def split_points(source: WorkerTimes, sink: WorkerTimes, num_held: int, num_tokens: int, block_size: int) -> list[int]:
    """Tokens of a prompt, in whole blocks, at which it may move from `source`, which holds the first `num_held`: at a
    quarter, half and three quarters of it, and where the source is done when the sink's queue is."""
    spare_s = ttft_s(sink, 0.0) - ttft_s(source, 0.0)
    token_s = prefill_s(source, num_held, num_tokens) * source.stretch / (num_tokens - num_held)
    balanced = num_held + int(spare_s / token_s) if token_s > 0 else 0
    points = {point // block_size * block_size for point in (*(num_tokens * i // 4 for i in (1, 2, 3)), balanced)}
    return sorted(point for point in points if num_held < point < num_tokens)


def _least_busy(candidates: Sequence[_Candidate], facts: RequestFacts) -> FleetWorker:
    """Worker with the least to do: the tokens of the prompt that it has not cached, and a part of the answers of its
    sequences, both at the cost of the first worker, so that differences of measurements do not count. Of several,
    another one for each sample."""
    if len(candidates) == 1:
        return candidates[0][0]
    num, cost = len(candidates), candidates[0][1].cost
    answer_s = ANSWER_TOKENS * max(cost.decode_s, cost.prefill_s)
    keys: list[tuple[float, int, int]] = []
    for i, (worker, *_) in enumerate(candidates):
        uncached = facts.uncached_tokens(worker.incarnation) if facts.cached_tokens else 0
        num_sequences = worker.num_sequences
        busy_s = uncached * cost.prefill_s + num_sequences * answer_s
        keys.append((busy_s, num_sequences, (i - facts.sample) % num))
    return candidates[keys.index(min(keys))][0]


def _sample(fleet: Mapping[str, FleetWorker], facts: RequestFacts) -> Sequence[FleetWorker]:
    """Choose all of a few workers; of many, NUM_SAMPLED that differ from request to request, and those that have
    cached the most of the prompt. The best of a few at random is nearly as good as the best of all (Mitzenmacher,
    "The power of two choices in randomized load balancing", 2001)."""
    workers, num = list(fleet.values()), len(fleet)
    if num <= 2 * NUM_SAMPLED:
        return workers
    first = facts.sample
    found = [workers[i] for i in sorted([(first + i * num // NUM_SAMPLED) % num for i in range(NUM_SAMPLED)])]
    if facts.cached_tokens:
        for _, name in nsmallest(NUM_COMPARED, [(-num_held, name) for name, num_held in facts.cached_tokens.items()]):
            holder = fleet.get(name)
            if holder is not None and holder not in found:
                found.append(holder)
    return found


def choose_sink(workers: Iterable[FleetWorker], facts: RequestFacts, source: str) -> str | None:
    """Choose another decode worker for a hand-off that `source` still offers; None where there is none."""
    able = [w for w in _able(workers, facts) if w.role is not Role.PREFILL]
    barred = facts.excluded | {source} | {sink for peer, sink in facts.failed_pairs if peer == source}
    able = [w for w in able if w.incarnation not in barred]
    return _best_to_decode(able, facts) if able else None


def _able(workers: Iterable[FleetWorker], facts: RequestFacts) -> list[FleetWorker]:
    needed = facts.num_tokens + facts.max_new_tokens
    return [w for w in workers if w.is_available and w.max_context_tokens >= needed]


def _unavailable(workers: Sequence[FleetWorker]) -> Unavailable:
    num_down, num_draining = sum(not w.is_up for w in workers), sum(w.is_draining for w in workers)
    return Unavailable(
        f"no worker is available ({len(workers)} known, {num_down} without a link, {num_draining} draining): "
        "see `diptych status`, or try again in a moment"
    )


def _sinks_of(source: str, decoders: Sequence[FleetWorker]) -> Sequence[FleetWorker]:
    """Possible sinks of `source`. A mixed source keeps the sequence unless a decode worker has more room: mixed workers
    do not hand off to each other."""
    if any(w.incarnation == source for w in decoders):
        return [w for w in decoders if w.role is Role.DECODE or w.incarnation == source]
    return decoders


def _best_to_prefill(workers: Iterable[FleetWorker], facts: RequestFacts) -> str:
    def cost(w: FleetWorker) -> tuple[float, ...]:
        tokens = w.waiting_tokens + facts.uncached_tokens(w.incarnation)
        return w.is_full(facts.num_tokens), tokens + SEQUENCE_TOKENS * w.num_sequences, w.num_in_flight

    return min(workers, key=lambda w: (cost(w), w.incarnation)).incarnation


def _best_to_decode(workers: Iterable[FleetWorker], facts: RequestFacts) -> str:
    def cost(w: FleetWorker) -> tuple[float, ...]:
        return w.is_full(facts.num_tokens), (w.used_blocks + facts.num_blocks(w)) / w.num_blocks, w.num_in_flight

    return min(workers, key=lambda w: (cost(w), w.incarnation)).incarnation
