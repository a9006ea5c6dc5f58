"""Which workers take a request. Pure: the fleet, the request's facts and what the prefix caches hold -> Route.

    prefill worker   the fewest tokens to wait for: queued there, its own uncached ones, and the running sequences'
    decode worker    the least used KV memory after taking the sequence
    one alone        a mixed worker that is the best to prefill and to decode; a decode worker that needs to compute
                     almost nothing; whoever is left

Roles are weights, not walls: with no worker of a kind left, the other kind does its work.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...workers.common.errors import ConfigError, Unavailable
from ...workers.common.role import Role
from .fleet import FleetWorker
from .kv_costs import compute_s, pull_s

PULL_GAIN = 1.5  # a prefix is pulled where computing it would take so many times as long


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    alone_below_tokens: int = 0  # a decode worker prefills fewer uncached tokens than this itself; 0: never
    tokens_per_sequence: int = 8  # what a running sequence counts when queues are compared, in prefill tokens
    max_in_flight: int = 1024  # sequences at this router
    max_attempts: int = 3  # at one request, where workers fail
    worker_timeout_s: float = 5.0  # a worker silent for that long is lost
    hello_timeout_s: float = 5.0
    no_worker_wait_s: float = 30.0  # a request waits that long for a worker to come
    migrate: bool = True  # running sequences, from workers that drain or run short of KV memory
    max_migrations: int = 4  # away from one worker at a time
    pull_prefixes: bool = True  # that another worker has cached, where that is cheaper than to compute them
    reconnect_s: float = 0.1  # then twice as long each time, up to
    max_reconnect_s: float = 2.0

    def validate(self) -> None:
        """Raise ConfigError, naming the setting, for what cannot work."""
        for name in ("alone_below_tokens", "tokens_per_sequence"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("max_in_flight", "max_attempts", "max_migrations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("worker_timeout_s", "hello_timeout_s", "no_worker_wait_s", "reconnect_s", "max_reconnect_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class RequestFacts:
    num_tokens: int  # whose KV is needed: prompt, and output so far
    max_new_tokens: int
    cached_tokens: Mapping[str, int]  # by worker: leading tokens that its prefix cache holds
    excluded: frozenset[str] = frozenset()  # workers that failed this request; taken only when nobody else is left
    failed_pairs: frozenset[tuple[str, str]] = frozenset()  # source and sink that could not hand this request off
    may_hand_off: bool = True
    group: str = ""  # of requests for one prompt
    beside: "Route | None" = None  # where another of the group was sent

    def num_blocks(self, worker: FleetWorker) -> int:
        """Of that worker's size, with room for the next token."""
        return -(-(self.num_tokens + 1) // worker.block_size)

    def uncached_tokens(self, worker: str) -> int:
        """At least one: its logits are needed."""
        return max(self.num_tokens - self.cached_tokens.get(worker, 0), 1)


@dataclass(frozen=True, slots=True)
class PrefixSource:
    holder: str  # incarnation
    num_tokens: int  # leading ones, whole blocks of the holder


@dataclass(frozen=True, slots=True)
class Route:
    """Incarnations. `prefill` is None where one worker does all; `prefix` is for the one that computes the prompt."""

    prefill: str | None
    decode: str
    prefix: PrefixSource | None = None


def choose(workers: Sequence[FleetWorker], facts: RequestFacts, config: RoutingConfig) -> Route:
    """Raises Unavailable where no worker could take the request."""
    beside = _beside(workers, facts)
    if beside is not None:
        return beside  # what it computes or pulls is waited for there
    route = _choose_workers(workers, facts, config)
    if not (config.pull_prefixes and facts.cached_tokens and facts.may_hand_off):
        return route
    return replace(route, prefix=choose_prefix(workers, facts, route.prefill or route.decode))


def choose_prefix(workers: Sequence[FleetWorker], facts: RequestFacts, worker: str) -> PrefixSource | None:
    """From where `worker` best pulls the prompt's beginning; None: it computes what it has not."""
    sink = next(w for w in workers if w.incarnation == worker)
    num_held = facts.cached_tokens.get(worker, 0)
    best, best_saved_s = None, 0.0
    for source in workers:
        num_tokens = _pullable_tokens(source, facts)
        num_new = num_tokens - num_held
        pair = (source.incarnation, worker)
        if num_new <= 0 or not source.is_available or source is sink or pair in facts.failed_pairs:
            continue
        saved_s = compute_s(sink, num_new, workers) - PULL_GAIN * pull_s(source, sink, num_new)
        if saved_s > best_saved_s:
            best, best_saved_s = PrefixSource(source.incarnation, num_tokens), saved_s
    return best


def _pullable_tokens(source: FleetWorker, facts: RequestFacts) -> int:
    """Whole blocks that it holds; the last token's logits have to be computed."""
    num_tokens = min(facts.cached_tokens.get(source.incarnation, 0), facts.num_tokens - 1)
    return num_tokens // source.block_size * source.block_size


def _beside(workers: Sequence[FleetWorker], facts: RequestFacts) -> Route | None:
    """The way that another completion of the same prompt went, if it is open and has room: there the prompt is computed
    once."""
    if facts.beside is None:
        return None
    source, sink = facts.beside.prefill, facts.beside.decode
    able = {w.incarnation: w for w in _able(workers, facts) if w.incarnation not in facts.excluded}
    if sink not in able or _is_full(able[sink], facts):
        return None
    if source is not None and (source not in able or not facts.may_hand_off or (source, sink) in facts.failed_pairs):
        return None
    return Route(source, sink)


def _choose_workers(workers: Sequence[FleetWorker], facts: RequestFacts, config: RoutingConfig) -> Route:
    able = _able(workers, facts)
    if not able:
        raise _unavailable(workers)
    able = [w for w in able if w.incarnation not in facts.excluded] or able
    prefillers = [w for w in able if w.role is not Role.DECODE]
    decoders = [w for w in able if w.role is not Role.PREFILL]
    if not prefillers or not decoders or not facts.may_hand_off:
        return Route(None, _best_to_prefill(decoders or prefillers, facts, config))
    if facts.max_new_tokens == 1:
        return Route(None, _best_to_prefill(prefillers, facts, config))
    knowing = [w for w in decoders if facts.uncached_tokens(w.incarnation) < config.alone_below_tokens]
    if knowing:
        return Route(None, _best_to_decode(knowing, facts))
    source = _best_to_prefill(prefillers, facts, config)
    sinks = [w for w in _sinks_of(source, decoders) if (source, w.incarnation) not in facts.failed_pairs]
    sink = _best_to_decode(sinks, facts) if sinks else source
    return Route(None, sink) if sink == source else Route(source, sink)


def choose_sink(workers: Iterable[FleetWorker], facts: RequestFacts, source: str) -> str | None:
    """Another decode worker for a hand-off that `source` still offers; None where there is none."""
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
    """A mixed source keeps the sequence unless a decode worker has more room: mixed workers do not trade."""
    if any(w.incarnation == source for w in decoders):
        return [w for w in decoders if w.role is Role.DECODE or w.incarnation == source]
    return decoders


def _best_to_prefill(workers: Iterable[FleetWorker], facts: RequestFacts, config: RoutingConfig) -> str:
    def cost(w: FleetWorker) -> tuple[float, ...]:
        tokens = w.waiting_tokens + facts.uncached_tokens(w.incarnation)
        return _is_full(w, facts), tokens + config.tokens_per_sequence * w.num_sequences, w.num_in_flight

    return min(workers, key=lambda w: (cost(w), w.incarnation)).incarnation


def _best_to_decode(workers: Iterable[FleetWorker], facts: RequestFacts) -> str:
    def cost(w: FleetWorker) -> tuple[float, ...]:
        return _is_full(w, facts), (w.used_blocks + facts.num_blocks(w)) / w.num_blocks, w.num_in_flight

    return min(workers, key=lambda w: (cost(w), w.incarnation)).incarnation


def _is_full(worker: FleetWorker, facts: RequestFacts) -> bool:
    return worker.used_blocks + facts.num_blocks(worker) > worker.num_blocks
