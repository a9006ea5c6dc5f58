"""LaneDraft: a head that drafts on a device: what it computes is in order on a lane, and is waited for.

A step of the target is waited for before its drafts are begun, and these before the next step is launched. So what the
lane does needs no event of the target's lanes.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import TypeVar

from ...core.draft import NO_DRAFT, ModelDrafts
from ...core.draft_kv import DraftKV
from ...core.sequence import Batch, Sequence
from ...device.device import Device
from ...device.device_errors import is_full, lost
from .head_draft import HeadDraft

T = TypeVar("T")


class LaneDraft:
    """A ModelProposer. Where the device has too little memory nothing is drafted."""

    def __init__(self, head: HeadDraft, device: Device) -> None:
        self._head, self._lane = head, device.lane("drafts")

    @property
    def num_anew(self) -> int:
        return self._head.num_anew

    def attach(self, kv: DraftKV | None) -> None:
        self._head.attach(kv)
        if kv is not None:
            kv.on_seal = lambda sequence: self._run(partial(self._head.seal, sequence))

    def may_draft(self, sequence: Sequence) -> bool:
        return self._head.may_draft(sequence)

    def computed(self, batch: Batch) -> None:
        """See HeadDraft. Raises DeviceLost."""
        self._run(partial(self._head.computed, batch))

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> ModelDrafts:
        """See ModelProposer. Raises DeviceLost."""
        made = self._run(partial(self._head.propose, wanted))
        return made or ModelDrafts([NO_DRAFT] * len(wanted), [])

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        self._head.verified(sequence, num_accepted)

    def ended(self, sequence: Sequence) -> None:
        self._head.ended(sequence)

    def _run(self, work: Callable[[], T]) -> T | None:
        """Return what it gives once it is done; None: there was too little memory for it."""
        found: list[T] = []
        try:
            self._lane.run(lambda: found.append(work()))
            self._lane.record().wait()
        except Exception as e:
            if (device_lost := lost(e)) is not None:
                raise device_lost from e
            if not is_full(e):
                raise
            return None
        return found[0]
