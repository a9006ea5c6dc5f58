"""Budgets of a group by its load: what moves them, what does not, and what is noticed afterwards."""

from dataclasses import dataclass, field, replace

import pytest

from diptych.cluster.common.prediction import Level, WorkerCost, WorkerState, WorkerTimes, prefill_s
from diptych.cluster.control.budgets import (
    BARRED_S,
    EFFECT_S,
    HOLD_LOOKS,
    REPORT_LOOKS,
    REST_S,
    BudgetController,
    WorkerLook,
)
from diptych.cluster.control.decisions import DecisionLog
from diptych.cluster.control.dial import Demand, outlook
from diptych.cluster.control.growth import Prompts
from diptych.proto.worker_pb2 import LoadReport, StepCost
from diptych.workers.common.role import Role, budget_of

from .budget_plant import Plant

LEVEL = Level(ttft_s=3.0, tpot_s=0.05)
COST = WorkerCost(fixed_s=0.02, decode_s=0.001, context_s=0.0, prefill_s=0.0005, pair_s=0.0)
STEP_TOKENS, DECODE_TOKENS = 2048, 256
ALL = {role: budget_of(role, STEP_TOKENS, DECODE_TOKENS) for role in Role}


def test_an_outlook_by_hand() -> None:
    demand = Demand(400.0, 8.0, 0.0, 200.0, 0.0)
    mixed = outlook(0, 2, demand, COST, LEVEL)
    # Steps of 24 ms, of which the aim of 45 ms leaves 21; prompts need a tenth of each worker's time.
    assert mixed.tpot_s == pytest.approx(0.024 / 0.9)
    assert mixed.ttft_s == pytest.approx(0.1 / (21 / 45 - 0.1))
    split = outlook(1, 2, demand, COST, LEVEL)
    assert split.tpot_s == pytest.approx(0.028)
    assert split.ttft_s == pytest.approx(0.1 / 0.8)
    assert outlook(1, 2, Demand(2100.0, 8.0, 0.0, 200.0, 0.0), COST, LEVEL).missed > 0.99


def test_costs_of_nothing_are_no_reason_to_fail() -> None:
    free = replace(COST, fixed_s=0.0, prefill_s=0.0, hidden_s=0.0)
    found = outlook(0, 2, Demand(400.0, 8.0, 0.0, 200.0, 0.0), free, Level(1.0, 1e-6))
    assert (found.ttft_s, found.tpot_s) == (0.0, pytest.approx(4 * COST.decode_s))


def test_prompts_that_steps_hide_speak_for_mixed_workers() -> None:
    """Steps of 24 ms that compute 12 ms of prompts before they take longer: an aim of 45 ms leaves them 33 of 45."""
    demand, hiding = Demand(400.0, 8.0, 0.0, 200.0, 0.0), replace(COST, hidden_s=0.012)
    mixed = outlook(0, 2, demand, hiding, LEVEL)
    assert mixed.ttft_s == pytest.approx(0.1 / (33 / 45 - 0.1))
    assert mixed.tpot_s == pytest.approx(0.024 / (1 - 0.1 * 21 / 33))
    assert mixed.missed < outlook(0, 2, demand, COST, LEVEL).missed
    assert outlook(1, 2, demand, hiding, LEVEL) == outlook(1, 2, demand, COST, LEVEL), "one that only decodes has none"


def test_a_long_prompt_takes_the_dial_as_long_as_the_routes() -> None:
    cost = replace(COST, prefill_s=20e-6, pair_s=5e-9)
    demand = Demand(3200.0, 0.0, 0.0, 16_000.0, 0.0)
    own_s = prefill_s(WorkerTimes.of(WorkerState(STEP_TOKENS, STEP_TOKENS, 0, 0, 0, 0.0), cost, LEVEL), 0, 16_000)
    assert own_s == pytest.approx(0.96)
    assert outlook(1, 2, demand, cost, LEVEL).ttft_s == pytest.approx(own_s / (1 - 0.2 * own_s))


@dataclass
class Group:
    """Workers that compute what comes in at once, and take the budgets that they are told."""

    num: int = 2
    prompts_per_s: float = 0.0
    decodes: int = 0
    prompt_tokens: int = 512
    is_deaf: bool = False
    now: float = 0.0
    budgets: list[int] = field(default_factory=list[int])
    tokens: float = 0.0
    log: DecisionLog = field(default_factory=DecisionLog)

    def __post_init__(self) -> None:
        self.budgets = self.budgets or [ALL[Role.MIXED]] * self.num
        self.controller = BudgetController("mixed", LEVEL, self.log)
        self.changes: list[float] = []

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.tokens += self.prompts_per_s
            told = self.controller.look([self.look_at(i) for i in range(self.num)], self.now, self.now)
            if told:
                self.changes.append(self.now)
            for name, budget in told.items():
                if not self.is_deaf:
                    self.budgets[int(name)] = budget

    def look_at(self, i: int) -> WorkerLook:
        cost = StepCost(
            fixed_s=COST.fixed_s,
            decode_s=COST.decode_s,
            prefill_s=COST.prefill_s,
            prefill_is_measured=True,
            decode_is_measured=True,
        )
        load = LoadReport(
            prefill_budget=self.budgets[i],
            step_tokens=STEP_TOKENS,
            decode_role_tokens=DECODE_TOKENS,
            num_prefill_tokens=int(self.tokens / self.num),
            num_decoding=self.decodes // self.num,
            num_prompts=int(self.tokens / self.num) // self.prompt_tokens,
            num_prompt_tokens=int(self.tokens / self.num) // self.prompt_tokens * self.prompt_tokens,
            step_cost=cost,
        )
        return WorkerLook(str(i), load, 0)


def test_a_light_load_moves_nothing() -> None:
    for budgets in ([], [ALL[Role.PREFILL], ALL[Role.DECODE]]):
        group = Group(prompts_per_s=200, decodes=4, budgets=list(budgets))
        before = list(group.budgets)
        group.run(300)
        assert group.budgets == before and not group.changes


def test_prompts_that_stretch_the_decodes_get_a_worker_of_their_own() -> None:
    group = Group(prompts_per_s=1500, decodes=20)
    group.run(HOLD_LOOKS)
    assert group.budgets == [ALL[Role.MIXED]] * 2, "not at once"
    group.run(20)
    assert sorted(group.budgets) == [ALL[Role.DECODE], ALL[Role.PREFILL]]
    [decision] = group.log.statuses(group.now)
    assert decision.kind == "budgets" and decision.action == "0 -> 1 of 2 workers only prefill"
    assert "1500 prompt tokens/s and 20 sequences" in decision.reason


def test_where_nearly_all_are_late_whatever_is_done_all_are_mixed() -> None:
    group = Group(prompts_per_s=8000, decodes=300, budgets=[ALL[Role.PREFILL], ALL[Role.DECODE]])
    group.run(HOLD_LOOKS)
    assert group.budgets == [ALL[Role.PREFILL], ALL[Role.DECODE]], "not at once"
    group.run(600)
    assert group.budgets == [ALL[Role.MIXED]] * 2 and len(group.changes) == 1
    [decision] = group.log.statuses(group.now)
    assert decision.result.startswith("nearly all were late with any number") and not decision.has_failed
    prefill = Group(prompts_per_s=8000, decodes=300, budgets=[ALL[Role.PREFILL]] * 2)
    prefill.controller = BudgetController("prefill", LEVEL, prefill.log)
    prefill.run(600)
    assert prefill.budgets == [ALL[Role.PREFILL]] * 2, "another pool decodes"


def test_a_steady_load_changes_direction_never() -> None:
    for prompts_per_s in range(100, 4000, 300):
        group = Group(num=4, prompts_per_s=prompts_per_s, decodes=40)
        group.run(600)
        assert len(group.changes) <= 2, (prompts_per_s, group.changes)


@pytest.mark.parametrize("seed", range(4))
def test_a_steady_load_that_comes_at_random_changes_direction_once_a_minute_at_most(seed: int) -> None:
    plant = Plant(seed)
    for second in range(1, 601):
        plant.look(float(second))
    assert plant.turns and min(plant.turns) >= REST_S


def test_more_prompts_than_one_worker_computes_take_all() -> None:
    group = Group(prompts_per_s=200, decodes=4, prompt_tokens=16)
    group.run(20)  # until it knows how long prompts are
    group.prompts_per_s, group.decodes = 1500, 20
    group.run(20)
    assert group.budgets != [ALL[Role.MIXED]] * 2
    group.prompts_per_s, group.decodes = 3000, 0
    group.run(20)
    assert group.budgets == [ALL[Role.MIXED]] * 2, "though less than a minute has passed: the load is another one"


def test_a_change_that_helped_says_so() -> None:
    group = Group(prompts_per_s=1500, decodes=20)
    group.run(20 + int(EFFECT_S))
    [decision] = group.log.statuses(group.now)
    assert decision.result.startswith("it helped: expected misses") and not decision.has_failed


def test_a_budget_that_is_not_reported_back_is_named_and_not_tried_again_soon() -> None:
    group = Group(prompts_per_s=1500, decodes=20, is_deaf=True)
    group.run(20 + REPORT_LOOKS)
    [decision] = group.log.statuses(group.now)
    assert decision.has_failed and "not reported back by 0, 1 after 5 looks" in decision.result
    group.run(int(BARRED_S) - 30)
    assert group.log.num_made["budgets"] == group.log.num_failed["budgets"] == 1
    group.is_deaf = False
    group.run(60)
    assert sorted(group.budgets) == [ALL[Role.DECODE], ALL[Role.PREFILL]]


def test_one_worker_always_decodes() -> None:
    group = Group(num=1, prompts_per_s=5000, decodes=50)
    group.run(100)
    assert not group.changes
    group = Group(num=3, prompts_per_s=9000, decodes=50)
    group.run(100)
    assert group.budgets.count(ALL[Role.PREFILL]) < 3


@pytest.mark.parametrize("num", [1, 2])
def test_a_group_whose_decoders_have_left_gets_one_again(num: int) -> None:
    group = Group(num=num, budgets=[ALL[Role.PREFILL]] * num)
    group.run(10)
    assert not group.changes, "nothing decodes"
    group.decodes = 8
    group.run(HOLD_LOOKS + 2)
    assert sorted(group.budgets) == sorted([ALL[Role.MIXED]] + [ALL[Role.PREFILL]] * (num - 1))
    [decision] = group.log.statuses(group.now)
    assert decision.reason == "8 sequences decode at workers that only prefill: no other is left."
    assert decision.result == "a worker of the group decodes"


def test_a_prefill_pool_of_its_own_stays_one() -> None:
    group = Group(num=2, budgets=[ALL[Role.PREFILL]] * 2, decodes=2)
    group.controller = BudgetController("prefill", LEVEL, group.log)
    group.run(20)
    assert not group.changes


def test_a_last_worker_that_does_not_take_its_budget_is_named() -> None:
    group = Group(num=1, budgets=[ALL[Role.PREFILL]], decodes=8, is_deaf=True)
    group.run(60)
    [decision] = group.log.statuses(group.now)
    assert decision.has_failed and "not reported back by 0" in decision.result


def test_the_mean_prompt_is_measured_by_what_is_admitted() -> None:
    lengths = Prompts()

    def report(worker: str, prompts: int, tokens: int, cached: int) -> tuple[str, LoadReport]:
        return worker, LoadReport(num_prompts=prompts, num_prompt_tokens=tokens, num_cached_tokens=cached)

    assert lengths.see([report("a", 10, 9000, 1000)]) is None
    assert lengths.see([report("a", 12, 9700, 1100), report("b", 99, 1, 0)]) == 300.0
    assert lengths.see([report("a", 12, 9700, 1100), report("b", 99, 1, 0)]) is None
    assert lengths.see([report("a", 1, 50, 0), report("b", 100, 41, 0)]) == 40.0, "another process has its name"
