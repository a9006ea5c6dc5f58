"""Load report of an engine: counts of sequences, blocks and tokens, now and since its start."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...proto import worker_pb2
from ..common.wire import ROLE_TO_PROTO
from ..core.block_manager import BlockManager
from ..core.decoding import work_of
from ..core.runner import Runner
from ..core.scheduler import Scheduler
from ..core.sequence import Batch
from ..costs.load_parts import PrefillShare, step_cost_message
from .incoming import IncomingHandoffs
from .outgoing import OutgoingHandoffs

MAX_YIELD = 17  # tokens of a verification: 16 drafts, and the one after them


class EngineLoad:
    def __init__(
        self,
        runner: Runner,
        manager: BlockManager,
        scheduler: Scheduler,
        outgoing: OutgoingHandoffs,
        incoming: IncomingHandoffs,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._manager = manager
        self._scheduler = scheduler
        self._outgoing, self._incoming = outgoing, incoming
        self._num_prefill_tokens = 0
        self._num_decode_tokens = 0
        self._prefill_s = 0.0
        self._prefill_share = PrefillShare(clock())
        self._clock = clock
        self.num_failed_steps = 0
        self.num_forced_tokens = 0
        self.num_drafted: dict[str, int] = {}  # tokens, by method of speculation
        self.num_accepted: dict[str, int] = {}  # the same
        self.yields: list[int] = []  # verifications that yielded 1, 2, ... tokens; empty before the first

    def count(self, batch: Batch, elapsed_s: float) -> None:
        """Add a step, before what it computed is counted; its time is divided by tokens."""
        num_decode, num_prefill = batch.num_decode_tokens, batch.num_prefill_tokens
        for entry in batch.drafts:
            self.verified(entry.method, len(entry.draft), entry.num_accepted)
            num_decode -= len(entry.draft) - entry.num_accepted
        self._num_decode_tokens += num_decode
        self._num_prefill_tokens += num_prefill
        if num_prefill:
            self._prefill_s += elapsed_s * num_prefill / (num_decode + num_prefill)
            self._prefill_share.add(self._scheduler.cost, work_of(batch), elapsed_s, num_prefill)

    def verified(self, method: str, num_drafted: int, num_accepted: int) -> None:
        """Count a verification of drafts, which yielded the accepted ones and the token after them."""
        assert 0 <= num_accepted <= num_drafted < MAX_YIELD, f"{num_accepted} of {num_drafted} drafts accepted"
        self.num_drafted[method] = self.num_drafted.get(method, 0) + num_drafted
        self.num_accepted[method] = self.num_accepted.get(method, 0) + num_accepted
        self.yields = self.yields or [0] * MAX_YIELD
        self.yields[num_accepted] += 1

    def experts(self) -> list[worker_pb2.LayerExperts]:
        """Number of tokens sent to each expert, of the layers that have experts."""
        counts = self._runner.expert_tokens()
        if counts is None:
            return []
        return [
            worker_pb2.LayerExperts(layer=layer, tokens=counts[layer, :num].tolist())
            for layer, num in enumerate(self._runner.info.num_experts)
            if num
        ]

    def report(self) -> worker_pb2.LoadReport:
        """Make the report. O(running sequences), and of a mixture of experts O(layers x experts)."""
        manager, scheduler, outgoing, incoming = self._manager, self._scheduler, self._outgoing, self._incoming
        expert_tokens, proposer = self._runner.expert_tokens(), self._runner.proposer
        of_experts, imbalance = ([], []) if expert_tokens is None else _of_experts(expert_tokens)
        return worker_pb2.LoadReport(
            expert_tokens=of_experts,
            expert_imbalance=imbalance,
            num_running=scheduler.num_running,
            num_decoding=scheduler.num_decoding,
            num_waiting=scheduler.num_waiting + len(incoming.waiting_tables()),
            num_blocks=manager.num_blocks,
            num_free_blocks=manager.num_free,
            num_leased_blocks=manager.num_leased,
            num_quarantined_blocks=manager.num_quarantined,
            role=ROLE_TO_PROTO[scheduler.config.role_of(scheduler.prefill_budget)],
            prefill_budget=scheduler.prefill_budget,
            step_tokens=scheduler.config.step_tokens,
            decode_role_tokens=scheduler.config.decode_role_prefill_tokens,
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_handoffs_sent=outgoing.num_sent,
            num_handoffs_received=incoming.num_received,
            num_prompts=scheduler.prompts.num_prompts,
            num_prompt_tokens=scheduler.prompts.num_tokens,
            num_cached_tokens=scheduler.prompts.num_cached,
            num_waiting_tokens=scheduler.num_waiting_tokens + incoming.num_waiting_tokens,
            num_late_tokens=scheduler.num_late_tokens,
            prefill_s=self._prefill_s,
            num_migrated_out=outgoing.num_migrated_out,
            num_prefixes_pulled=incoming.num_prefixes_pulled,
            num_failed_steps=self.num_failed_steps,
            num_forced_tokens=self.num_forced_tokens,
            drafts=[
                worker_pb2.DraftCounts(method=method, num_drafted=num, num_accepted=self.num_accepted[method])
                for method, num in self.num_drafted.items()
            ],
            draft_yields=self.yields,
            num_draft_tokens_anew=0 if proposer is None else proposer.num_anew,
            num_draft_failures=0 if proposer is None else proposer.num_failures,
            is_draft_off=proposer is not None and proposer.is_off,
            step_cost=step_cost_message(scheduler.cost),
            prefill_share=self._prefill_share.at(self._clock()),
        )


def _of_experts(counts: npt.NDArray[np.int64]) -> tuple[list[int], list[float]]:
    """counts: [layers, experts]. Returns the tokens of each expert over all layers; and of each layer what its busiest
    expert has had by what an expert has had on average, 0 where none has had any."""
    means = counts.mean(axis=1)
    imbalance = np.divide(counts.max(axis=1), means, out=np.zeros_like(means), where=means > 0)
    return counts.sum(axis=0).tolist(), imbalance.tolist()
