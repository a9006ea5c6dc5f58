"""DeviceDraft: what drafts on a device: a device that is full drafts nothing, and one that is lost is told by name."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import TypeVar

from ...core.draft import NO_DRAFT, ModelDrafts
from ...core.draft_kv import DraftKV
from ...core.sequence import Batch, Sequence
from ...device.device_errors import is_full, lost
from .drafted_step import DraftingModel

T = TypeVar("T")


class DeviceDraft:
    """A DraftingModel."""

    def __init__(self, own: DraftingModel) -> None:
        self.own = own

    @property
    def num_anew(self) -> int:
        return self.own.num_anew

    def attach(self, kv: DraftKV | None) -> None:
        self.own.attach(kv)
        if kv is not None:
            seal = kv.on_seal
            kv.on_seal = lambda sequence: self._run(partial(seal, sequence))

    def may_draft(self, sequence: Sequence) -> bool:
        return self.own.may_draft(sequence)

    def computed(self, batch: Batch) -> None:
        """See DraftingModel. Raises DeviceLost."""
        self._run(partial(self.own.computed, batch))

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> ModelDrafts:
        """See ModelProposer. Raises DeviceLost."""
        return self._run(partial(self.own.propose, wanted)) or ModelDrafts([NO_DRAFT] * len(wanted), [])

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        self.own.verified(sequence, num_accepted)

    def ended(self, sequence: Sequence) -> None:
        self.own.ended(sequence)

    def _run(self, work: Callable[[], T]) -> T | None:
        """Return what it gives; None: there was too little memory for it."""
        try:
            return work()
        except Exception as e:
            if (device_lost := lost(e)) is not None:
                raise device_lost from e
            if not is_full(e):
                raise
            return None
