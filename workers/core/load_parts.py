"""Parts of a worker's load report that need memory: its prompts, the share of its time for them, the cost of its steps.
Pure."""

import math
from dataclasses import dataclass

from ...proto import worker_pb2
from ..costs.step_cost import StepCost

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
    """Share of the time that goes to prompts, averaged over the last seconds."""

    def __init__(self, now: float) -> None:
        self._at, self._prefill_s, self._share = now, 0.0, 0.0

    @property
    def value(self) -> float:
        """The share as it was last asked for."""
        return self._share

    def at(self, now: float, prefill_s: float) -> float:
        """prefill_s: seconds for prompts since the start."""
        elapsed_s = now - self._at
        if elapsed_s > 0:
            weight = 1 - math.exp(-elapsed_s / SHARE_S)
            self._share += weight * (min((prefill_s - self._prefill_s) / elapsed_s, 1.0) - self._share)
            self._at, self._prefill_s = now, prefill_s
        return self._share


def step_cost_message(cost: StepCost) -> worker_pb2.StepCost:
    fixed_s, decode_s, context_s, prefill_s, pair_s = cost.weights
    return worker_pb2.StepCost(
        fixed_s=fixed_s,
        decode_s=decode_s,
        context_s=context_s,
        prefill_s=prefill_s,
        pair_s=pair_s,
        prefill_is_measured=cost.is_measured,
        decode_is_measured=cost.decode_is_measured,
    )
