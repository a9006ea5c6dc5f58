"""Decisions of the controllers, each with its reason and, once that is known, what came of it. Pure."""

from collections import Counter, deque
from dataclasses import dataclass

NUM_KEPT = 20


@dataclass(slots=True, eq=False)
class ControlDecision:
    """Change that a controller made. `result`: empty until it is known."""

    at: float  # monotonic s
    kind: str  # budgets or replicas
    subject: str  # pools
    action: str
    reason: str  # one sentence with its figures
    result: str = ""
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class DecisionStatus:
    """ControlDecision as a person reads it."""

    age_s: float
    kind: str
    subject: str
    action: str
    reason: str
    result: str
    has_failed: bool


@dataclass(frozen=True, slots=True)
class ForecastStatus:
    """Load that is expected soon on pools whose workers may change places, and how many of these only prefill."""

    pools: str
    prompt_tokens_per_s: float
    num_decodes: float  # sequences
    num_prefill: int  # workers, now
    best_num_prefill: int  # by the outlook of the last look
    expected_misses: float  # share of requests, as things are
    best_expected_misses: float


class DecisionLog:
    """Last decisions, and how many there were of each kind."""

    def __init__(self) -> None:
        self._last: deque[ControlDecision] = deque(maxlen=NUM_KEPT)
        self.num_made: Counter[str] = Counter()  # by kind
        self.num_verified: Counter[str] = Counter()
        self.num_failed: Counter[str] = Counter()

    def add(self, decision: ControlDecision) -> ControlDecision:
        self._last.append(decision)
        self.num_made[decision.kind] += 1
        return decision

    def close(self, decision: ControlDecision, result: str, *, has_failed: bool) -> None:
        """Note what came of a decision; of several results the first failure stays."""
        if decision.has_failed:
            return
        self.num_verified[decision.kind] += (not has_failed) - bool(decision.result)
        decision.result, decision.has_failed = result, has_failed
        self.num_failed[decision.kind] += has_failed

    def statuses(self, now: float) -> tuple[DecisionStatus, ...]:
        """Return the last decisions, newest first."""
        return tuple(
            DecisionStatus(now - d.at, d.kind, d.subject, d.action, d.reason, d.result, d.has_failed)
            for d in reversed(self._last)
        )
