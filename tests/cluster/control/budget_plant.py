"""Workers whose sequences and queues follow from their budgets, under requests that come at random: their number in a
second has a Poisson distribution, and a prompt of PROMPT_TOKENS is followed by ANSWER_TOKENS."""

import random

from diptych.cluster.common.prediction import Level
from diptych.cluster.control.budgets import BudgetController, WorkerLook
from diptych.cluster.control.decisions import DecisionLog
from diptych.proto.worker_pb2 import LoadReport, StepCost
from diptych.workers.common.role import Role, budget_of

RATE, PROMPT_TOKENS, ANSWER_TOKENS = 6.0, 500, 100  # requests a second, and tokens of each
NUM_WORKERS, STEP_TOKENS, DECODE_TOKENS = 4, 2048, 256
LEVEL = Level(ttft_s=3.0, tpot_s=0.05)
COST = StepCost(fixed_s=0.02, decode_s=0.001, prefill_s=0.0005, prefill_is_measured=True, decode_is_measured=True)
LEAST_SHARE = 0.3  # of a mixed worker's time, for prompts


class Plant:
    """Call `look` once a second. `turns`: seconds between two changes of the budgets of which the later one takes the
    other back."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._controller = BudgetController("mixed", LEVEL, DecisionLog())
        self._budgets = [budget_of(Role.MIXED, STEP_TOKENS, DECODE_TOKENS)] * NUM_WORKERS
        self._waiting: list[float] = []  # tokens of each prompt that are left
        self._answers: list[float] = []
        self._num_prefilled, self._num_prompts = 0.0, 0
        self._last = (0.0, 0)  # time and direction of the last change
        self.turns: list[float] = []

    def look(self, now: float) -> None:
        self._work()
        before = self._num_prefill
        for name, budget in self._controller.look([self._report(i) for i in range(NUM_WORKERS)], now, now).items():
            self._budgets[int(name)] = budget
        if direction := (self._num_prefill > before) - (self._num_prefill < before):
            if self._last[1] == -direction:
                self.turns.append(now - self._last[0])
            self._last = now, direction

    @property
    def _num_prefill(self) -> int:
        return sum(budget == STEP_TOKENS for budget in self._budgets)

    def _work(self) -> None:
        """One second of all workers."""
        self._waiting += [float(PROMPT_TOKENS)] * self._num_arrivals()
        num_decoders = NUM_WORKERS - self._num_prefill
        step_s = COST.fixed_s + COST.decode_s * len(self._answers) / num_decoders
        most_s = float(self._num_prefill or NUM_WORKERS * max(1 - step_s / LEVEL.tpot_s, LEAST_SHARE))
        left_s, begun = most_s, 0
        while self._waiting and left_s > 0:
            done = min(self._waiting[0], left_s / COST.prefill_s)
            left_s -= done * COST.prefill_s
            self._waiting[0] -= done
            self._num_prefilled += done
            if self._waiting[0] <= 0:
                self._waiting.pop(0)
                begun += 1
        share = 0.0 if self._num_prefill else (most_s - left_s) / NUM_WORKERS
        num_tokens = (1 - share) / step_s
        self._answers = [left - num_tokens for left in self._answers if left > num_tokens]
        self._answers += [float(ANSWER_TOKENS)] * begun
        self._num_prompts += begun

    def _num_arrivals(self) -> int:
        num, at = 0, self._rng.expovariate(RATE)
        while at < 1.0:
            num, at = num + 1, at + self._rng.expovariate(RATE)
        return num

    def _report(self, i: int) -> WorkerLook:
        num_prompts = self._num_prompts // NUM_WORKERS
        load = LoadReport(
            prefill_budget=self._budgets[i],
            step_tokens=STEP_TOKENS,
            decode_role_tokens=DECODE_TOKENS,
            num_prefill_tokens=int(self._num_prefilled / NUM_WORKERS),
            num_waiting_tokens=int(sum(self._waiting) / NUM_WORKERS),
            num_decoding=len(self._answers[i::NUM_WORKERS]),
            num_prompts=num_prompts,
            num_prompt_tokens=num_prompts * PROMPT_TOKENS,
            step_cost=COST,
        )
        return WorkerLook(str(i), load, 0)
