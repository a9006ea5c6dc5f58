"""What an engine says of its load: counts of sequences, blocks and tokens, and of what it has done since its start."""

from ..proto import worker_pb2
from .block_manager import BlockManager
from .engine_handoff import HandoffLedger
from .scheduler import Scheduler
from .sequence import Batch
from .wire import ROLE_TO_PROTO


class EngineLoad:
    def __init__(self, manager: BlockManager, scheduler: Scheduler, handoffs: HandoffLedger) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._handoffs = handoffs
        self._num_prefill_tokens = 0
        self._num_decode_tokens = 0
        self._prefill_s = 0.0

    def count(self, batch: Batch, elapsed_s: float) -> None:
        """A step's time is shared out by tokens."""
        num_prefill = batch.num_prefill_tokens
        self._num_decode_tokens += batch.num_decodes
        self._num_prefill_tokens += num_prefill
        if num_prefill:
            self._prefill_s += elapsed_s * num_prefill / (batch.num_decodes + num_prefill)

    def report(self) -> worker_pb2.LoadReport:
        """O(sequences that run)."""
        manager, scheduler, handoffs = self._manager, self._scheduler, self._handoffs
        return worker_pb2.LoadReport(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + handoffs.num_importing,
            num_blocks=manager.num_blocks,
            num_free_blocks=manager.num_free,
            num_leased_blocks=manager.num_leased,
            num_quarantined_blocks=manager.num_quarantined,
            role=ROLE_TO_PROTO[scheduler.role],
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_handoffs_sent=handoffs.num_sent,
            num_handoffs_received=handoffs.num_received,
            num_handoffs_failed=handoffs.num_failed,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            prefill_s=self._prefill_s,
            num_migrated_out=handoffs.num_migrated_out,
            num_prefixes_pulled=handoffs.num_prefixes_pulled,
        )
