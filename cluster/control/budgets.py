"""Moves the prefill budgets of a group of interchangeable workers by its load. Pure: looks in, budgets out.

    look ─> demand, forecast ─> outlook of each number of workers that only prefill (dial.py)
         ─> better for HOLD_LOOKS looks: change, with its reason ─> do the workers report it? did it help?

A change in the other direction waits REST_S seconds, unless the prompts that come have changed by CHANGED and more
since. How many sequences decode is no reason: it follows from the budgets, and a change would license its reversal. A
change that a worker does not report, or that does not help, is noted, and not tried again for BARRED_S seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...proto.worker_pb2 import LoadReport
from ...workers.common.role import Role, budget_of
from ..common.prediction import FleetCosts, Level
from .decisions import ControlDecision, DecisionLog, ForecastStatus
from .dial import Demand, Outlook, outlooks
from .forecast import Forecast, Holt
from .growth import Arrivals, Prompts, mean_cost

HORIZON_S = 5.0  # of the forecast: a change of budgets takes less
HOLD_LOOKS = 3
LEAST_GAIN = 0.05  # share of requests that a change must spare from missing
NEARLY_ALL = 0.95  # share of requests that miss their level, from which on no number of workers is better by it
SETTLE_S = 5.0  # between two changes
REST_S = 60.0  # between two changes of which one takes the other back
CHANGED = 1.5  # factor by which prompts (or decodes) differ from when the budgets changed
DEVIATIONS = 3.0  # by which they differ besides: each look of a minute tries whether they do
REPORT_LOOKS = 5  # in which a worker must report a new budget
EFFECT_S = 20.0  # after which a change must have helped
BARRED_S = 600.0
USUAL_PROMPT = 512.0  # tokens, before any prompt was admitted


@dataclass(frozen=True, slots=True)
class WorkerLook:
    """One worker's newest report. `num_context`: tokens in its KV cache that are in use."""

    worker_id: str
    load: LoadReport
    num_context: int

    @property
    def only_prefills(self) -> bool:
        return self.load.prefill_budget >= self.load.step_tokens

    def budget(self, role: Role) -> int:
        return budget_of(role, self.load.step_tokens, self.load.decode_role_tokens)


@dataclass(slots=True)
class _Change:
    """Last change of the budgets, until it is known whether it helped."""

    decision: ControlDecision
    at: float
    direction: int
    before: Outlook
    expected: Outlook
    demand: Demand
    is_open: bool = True


class BudgetController:
    """Controller of one group of workers. `pools`: their names."""

    def __init__(self, pools: str, level: Level, log: DecisionLog) -> None:
        self._pools, self._level, self._log = pools, level, log
        self._hands_over = pools == Role.PREFILL.value  # to another group: it is a prefill pool alone
        self.forecast: ForecastStatus | None = None  # of the last look that could tell
        self._costs = FleetCosts()
        self._prompts = Forecast()  # tokens a second
        self._decodes = Holt()
        self._prompt_tokens = Holt(level=USUAL_PROMPT, num_seen=1)
        self._arrivals, self._prompt_lengths = Arrivals(), Prompts()
        self._workers: frozenset[str] = frozenset()  # at the last look
        self._last_look = 0.0
        self._num_better, self._direction = 0, 0  # looks in a row in which a change in that direction was better
        self._change: _Change | None = None
        self._wanted: dict[str, int] = {}  # budgets that workers do not report yet
        self._wanted_by: ControlDecision | None = None
        self._num_lone = 0  # looks in a row in which sequences decoded, all at workers that should only prefill
        self._num_unreported = 0
        self._barred: dict[int | str, float] = {}  # numbers of prefilling workers, and workers; until when (s)

    def look(self, workers: Sequence[WorkerLook], now: float, time_of_day_s: float) -> dict[str, int]:
        """Return the budgets to change, by worker. Call it once a second, with the workers that are ready."""
        demand = self._see(workers, now, time_of_day_s)
        self._verify_reports(workers, now)
        if (found := self._decoder_for(workers, now)) or self._num_lone:
            return found
        if demand is None or len(workers) < 2 or not self._costs.are_known:
            return {}
        found = outlooks(len(workers), demand, mean_cost([self._costs.of(w.worker_id) for w in workers]), self._level)
        current = min(sum(w.only_prefills for w in workers), len(found) - 1)
        self._verify_effect(found[current], demand, now)
        best = min(found, key=lambda o: (o.missed, abs(o.num_prefill - current)))
        if best.missed >= NEARLY_ALL and not self._hands_over:
            best = found[0]  # all are mixed: none waits for work that another one has
        self.forecast = self._forecast(demand, found[current], best)
        if not self._may_change(found[current], best, demand, now):
            return {}
        return self._change_to(best, found[current], workers, demand, now)

    def _decoder_for(self, workers: Sequence[WorkerLook], now: float) -> dict[str, int]:
        """Return a budget for the worker on which most sequences decode, where that is done by workers alone that
        should only prefill, since the others have left: their steps have no target time."""
        is_lone = not self._hands_over and all(w.only_prefills for w in workers)
        self._num_lone = self._num_lone + 1 if is_lone and any(w.load.num_decoding for w in workers) else 0
        movable = [w for w in workers if not self._is_barred(w.worker_id, now)]
        if not self._num_lone or self._num_lone < HOLD_LOOKS or self._wanted or not movable:
            return {}
        busiest = max(movable, key=lambda w: (w.load.num_decoding, w.worker_id))
        num_decodes = sum(w.load.num_decoding for w in workers)
        decision = ControlDecision(
            at=now,
            kind="budgets",
            subject=self._pools,
            action=f"{len(workers)} -> {len(workers) - 1} of {len(workers)} workers only prefill",
            reason=f"{num_decodes} sequences decode at workers that only prefill: no other is left.",
        )
        self._wanted_by, self._num_unreported = self._log.add(decision), 0
        self._wanted = {busiest.worker_id: busiest.budget(Role.MIXED)}
        return dict(self._wanted)

    def _forecast(self, demand: Demand, current: Outlook, best: Outlook) -> ForecastStatus:
        return ForecastStatus(
            self._pools,
            demand.prompt_tokens_per_s,
            demand.num_decodes,
            current.num_prefill,
            best.num_prefill,
            current.missed,
            best.missed,
        )

    def _see(self, workers: Sequence[WorkerLook], now: float, time_of_day_s: float) -> Demand | None:
        elapsed_s, self._last_look = now - self._last_look, now
        reports = [(w.worker_id, w.load) for w in workers]
        arrived = self._arrivals.see(reports)
        for w in workers:
            self._costs.report(w.worker_id, w.load.step_cost)
        before, self._workers = self._workers, frozenset(w.worker_id for w in workers)
        for gone in before - self._workers:
            self._costs.forget(gone)
        if arrived is None or elapsed_s <= 0:
            return None
        self._prompts.see(time_of_day_s, arrived / elapsed_s)
        self._decodes.see(sum(w.load.num_decoding for w in workers))
        if (mean := self._prompt_lengths.see(reports)) is not None:
            self._prompt_tokens.see(mean)
        return Demand(
            prompt_tokens_per_s=self._prompts.ahead(HORIZON_S),
            num_decodes=self._decodes.ahead(HORIZON_S),
            num_context=sum(w.num_context for w in workers if w.load.num_decoding),
            prompt_tokens=self._prompt_tokens.ahead(0),
            waiting_tokens=sum(w.load.num_waiting_tokens for w in workers),
        )

    def _may_change(self, current: Outlook, best: Outlook, demand: Demand, now: float) -> bool:
        direction = (best.num_prefill > current.num_prefill) - (best.num_prefill < current.num_prefill)
        is_worth_it = current.missed - best.missed >= LEAST_GAIN or best.missed >= NEARLY_ALL
        if not direction or not is_worth_it or self._is_barred(best.num_prefill, now):
            self._num_better = 0
            return False
        self._num_better = self._num_better + 1 if direction == self._direction else 1
        self._direction = direction
        last = self._change
        if self._wanted or self._num_better < HOLD_LOOKS or (last and now - last.at < SETTLE_S):
            return False
        takes_back = last is not None and last.direction != direction
        return not (last and takes_back and now - last.at < REST_S and not _do_prompts_differ(last.demand, demand))

    def _change_to(
        self, best: Outlook, current: Outlook, workers: Sequence[WorkerLook], demand: Demand, now: float
    ) -> dict[str, int]:
        movable = [w for w in workers if not self._is_barred(w.worker_id, now)]
        order = sorted(movable, key=lambda w: (not w.only_prefills, w.load.num_decoding, w.worker_id))
        others = Role.DECODE if best.num_prefill else Role.MIXED
        roles = {w.worker_id: Role.PREFILL if i < best.num_prefill else others for i, w in enumerate(order)}
        budgets = {w.worker_id: w.budget(roles[w.worker_id]) for w in movable}
        changed = {w.worker_id: b for w in movable if (b := budgets[w.worker_id]) != w.load.prefill_budget}
        self._num_better = 0
        if not changed:
            return {}
        decision = ControlDecision(
            at=now,
            kind="budgets",
            subject=self._pools,
            action=f"{current.num_prefill} -> {best.num_prefill} of {len(workers)} workers only prefill",
            reason=f"{demand.prompt_tokens_per_s:.0f} prompt tokens/s and {demand.num_decodes:.0f} sequences that "
            f"decode are expected: {_times(current)} become {_times(best)}.",
        )
        direction = 1 if best.num_prefill > current.num_prefill else -1
        self._change = _Change(self._log.add(decision), now, direction, current, best, demand)
        self._wanted, self._num_unreported = dict(changed), 0
        self._wanted_by = self._change.decision
        return changed

    def _verify_reports(self, workers: Sequence[WorkerLook], now: float) -> None:
        """Note which workers have not taken their budgets after some looks; those are left alone for a while."""
        if not self._wanted or not self._wanted_by:
            return
        reported = {w.worker_id: w.load.prefill_budget for w in workers}
        self._wanted = {w: b for w, b in self._wanted.items() if w in reported and reported[w] != b}
        self._num_unreported += bool(self._wanted)
        is_for_decodes = self._change is None or self._change.decision is not self._wanted_by
        if not self._wanted and is_for_decodes:
            self._log.close(self._wanted_by, "a worker of the group decodes", has_failed=False)
        if self._wanted and self._num_unreported >= REPORT_LOOKS:
            names = ", ".join(sorted(self._wanted))
            result = f"not reported back by {names} after {REPORT_LOOKS} looks; not tried again for {BARRED_S:.0f} s"
            self._log.close(self._wanted_by, result, has_failed=True)
            if self._change and not is_for_decodes:
                self._change.is_open = False
            self._barred |= dict.fromkeys(self._wanted, now + BARRED_S)
            self._wanted = {}

    def _verify_effect(self, current: Outlook, demand: Demand, now: float) -> None:
        last = self._change
        if last is None or not last.is_open or now - last.at < EFFECT_S:
            return
        last.is_open = False
        figures = f"expected misses {last.before.missed:.0%} before, {current.missed:.0%} now"
        is_another = _do_prompts_differ(last.demand, demand)
        if last.expected.missed >= NEARLY_ALL:
            self._log.close(last.decision, f"nearly all were late with any number: {figures}", has_failed=False)
        elif is_another or _differ(last.demand.num_decodes, demand.num_decodes, unit=1.0):
            self._log.close(last.decision, f"the load has changed since: {figures}", has_failed=False)
        elif current.missed < last.before.missed:
            self._log.close(last.decision, f"it helped: {figures}", has_failed=False)
        else:
            self._barred[last.expected.num_prefill] = now + BARRED_S
            result = f"it did not help: {figures}; not tried again for {BARRED_S:.0f} s"
            self._log.close(last.decision, result, has_failed=True)

    def _is_barred(self, key: int | str, now: float) -> bool:
        return self._barred.get(key, now) > now


def _do_prompts_differ(before: Demand, now: Demand) -> bool:
    return _differ(before.prompt_tokens_per_s, now.prompt_tokens_per_s, before.prompt_tokens)


def _differ(before: float, now: float, unit: float) -> bool:
    """Return whether two rates differ by the factor CHANGED, and by more than chance: what comes at random in units of
    `unit` at a rate x varies by about sqrt(x · unit) from one second to the next."""
    low = max(min(before, now), unit)
    return max(before, now) > CHANGED * low + DEVIATIONS * math.sqrt(low * unit)


def _times(outlook: Outlook) -> str:
    return f"TTFT {outlook.ttft_s:.2g} s and TPOT {outlook.tpot_s * 1e3:.0f} ms ({outlook.missed:.0%} late)"
