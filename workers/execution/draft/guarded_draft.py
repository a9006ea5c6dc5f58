"""GuardedDraft: an exception in a pass of the model that drafts costs drafts, and no answer.

    a pass raises        its sequences are drafted for no more; what it was to compute of the draft's KV is not counted
    MOST_FAILURES times  the draft is off until the worker ends, unless ENOUGH passes went well after the one before

The target's KV is as it was: a draft's pass writes layers of its own, or, where it skips layers of the target, slots
after `num_computed`, which the target's step writes before anybody reads them. An error after which the target cannot
compute either is raised: a lost rank or device.
"""

import logging
from collections.abc import Generator, Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from ...common.errors import RankLost
from ...core.draft import NO_DRAFT, ModelDrafts, ModelProposer
from ...core.draft_kv import DraftKV
from ...core.sequence import Batch, Sequence
from ...device.device_errors import lost
from ..common.draft_turns import DraftTurns

log = logging.getLogger("diptych.worker")

MOST_FAILURES = 3
ENOUGH = 1000  # calls without an exception, after which earlier ones are forgotten


class ComputingProposer(ModelProposer, Protocol):
    def computed(self, batch: Batch) -> None:
        """Compute the draft's KV of what a batch computed of prompts, before it is counted."""
        ...

    def close(self) -> None:
        """Free what a device holds for passes: none follows. Idempotent."""
        ...


class GuardedDraft:
    """A GuardedProposer."""

    def __init__(self, draft: ComputingProposer, turns: DraftTurns | None = None) -> None:
        """turns: with steps of other workers."""
        self.draft, self._turns = draft, turns
        self._failed: set[str] = set()  # keys of sequences that are not drafted for
        self._num_recent = 0  # exceptions
        self._num_since = 0  # calls since the last of them
        self.num_failures = 0
        self.is_off = False

    @property
    def num_anew(self) -> int:
        return self.draft.num_anew

    def attach(self, kv: DraftKV | None) -> None:
        self.draft.attach(kv)
        if kv is not None:
            seal = kv.on_seal

            def on_seal(sequence: Sequence) -> None:
                if not self._leaves_out(sequence):
                    with self._guarding([sequence]):
                        seal(sequence)

            kv.on_seal = on_seal

    def may_draft(self, sequence: Sequence) -> bool:
        return not self._leaves_out(sequence) and self.draft.may_draft(sequence)

    def computed(self, batch: Batch) -> None:
        """Called once a step, of which most have no prompts: O(1) beside the draft's own work."""
        if self.is_off:
            return
        first = batch.num_decodes + batch.num_runs
        prompts = batch.entries[first:] if first < len(batch.entries) else ()
        if prompts and self._failed:
            prompts = [entry for entry in prompts if entry.sequence.key not in self._failed]
            batch = replace(batch, entries=[*batch.entries[:first], *prompts])
        before = [(entry.sequence, entry.sequence.num_draft_computed) for entry in prompts]
        try:
            self.draft.computed(batch)
        except Exception as error:  # noqa: BLE001 - see _failure
            of_all = [(entry.sequence, entry.sequence.num_draft_computed) for entry in batch.entries]
            self._failure(error, before or of_all)
        else:
            self._num_since += 1

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> ModelDrafts:
        with self._guarding([sequence for sequence, _ in wanted]):
            if self._turns is not None:
                self._turns.hold()
            return self.draft.propose(wanted)
        return ModelDrafts([NO_DRAFT] * len(wanted), [])

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        self.draft.verified(sequence, num_accepted)

    def ended(self, sequence: Sequence) -> None:
        self._failed.discard(sequence.key)
        self.draft.ended(sequence)

    def close(self) -> None:
        self.draft.close()

    def _leaves_out(self, sequence: Sequence) -> bool:
        return self.is_off or sequence.key in self._failed

    @contextmanager
    def _guarding(self, sequences: Iterable[Sequence]) -> Generator[None]:
        """Suppress what a pass of these sequences raises, but for what `_failure` raises."""
        before = [(sequence, sequence.num_draft_computed) for sequence in sequences]
        try:
            yield
        except Exception as error:  # noqa: BLE001 - see _failure
            self._failure(error, before)
        else:
            self._num_since += 1

    def _failure(self, error: Exception, before: Iterable[tuple[Sequence, int]]) -> None:
        """Note what a pass raised, whatever it is: no answer needs the draft. before: of each of its sequences, how
        many tokens had the draft's KV. Raises RankLost where the target is lost, too."""
        if isinstance(error, RankLost):
            raise error
        if (device_lost := lost(error)) is not None:
            raise device_lost from error
        for sequence, num_computed in before:
            sequence.num_draft_computed = min(sequence.num_draft_computed, num_computed)
            self.draft.ended(sequence)
            self._failed.add(sequence.key)
        self._count(error)

    def _count(self, error: Exception) -> None:
        self.num_failures += 1
        self._num_recent = 1 if self._num_since >= ENOUGH else self._num_recent + 1
        self._num_since = 0
        if self._num_recent < MOST_FAILURES:
            log.warning("a draft failed; its sequences continue without drafts", exc_info=error)
        elif not self.is_off:
            self.is_off = True
            log.error(
                "a draft failed for the %dth time: this worker drafts no more. Report it, or set another draft_model",
                self.num_failures,
                exc_info=error,
            )
