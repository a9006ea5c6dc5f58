"""Parts of a worker's load report that need memory: its prompts, the share of its time for them, the cost of its steps.
Pure."""

import math
from dataclasses import dataclass

from ...proto import worker_pb2
from .step_cost import StepCost, StepWork

SHARE_S = 5.0  # over which the share of prompts is averaged


@dataclass(slots=True)
class PromptCounts:
    """Counts of the prompts that were admitted, once each."""

    num_prompts: int = 0
    num_tokens: int = 0
    num_cached: int = 0  # of those tokens, found in the prefix cache

    def add(self, num_tokens: int, num_cached: int) -> None:
        self.num_prompts += 1
        self.num_tokens += num_tokens
        self.num_cached += num_cached


class PrefillShare:
    """Share of the time by which prompts make steps longer, averaged over the last seconds."""

    def __init__(self, now: float) -> None:
        self._at, self._share = now, 0.0
        self._delay_s = 0.0  # that the share does not count yet

    @property
    def value(self) -> float:
        """The share as it was last asked for."""
        return self._share

    def add(self, cost: StepCost, work: StepWork, seconds: float, num_prefill: int) -> None:
        """Count a step of `work` that took `seconds`; num_prefill: tokens of its chunks that are not drafts."""
        if num_prefill:
            self._delay_s += cost.delay_s(work, seconds) * num_prefill / work.num_prefill

    def at(self, now: float) -> float:
        """The share now."""
        elapsed_s = now - self._at
        if elapsed_s > 0:
            weight = 1 - math.exp(-elapsed_s / SHARE_S)
            self._share += weight * (min(self._delay_s / elapsed_s, 1.0) - self._share)
            self._at, self._delay_s = now, 0.0
        return self._share


def step_cost_message(cost: StepCost) -> worker_pb2.StepCost:
    fixed_s, decode_s, context_s, prefill_s, pair_s, hidden_s = cost.weights
    return worker_pb2.StepCost(
        fixed_s=fixed_s,
        decode_s=decode_s,
        context_s=context_s,
        prefill_s=prefill_s,
        pair_s=pair_s,
        hidden_s=hidden_s,
        prefill_is_measured=cost.is_measured,
        decode_is_measured=cost.decode_is_measured,
    )
