"""What drafts on a device that is full, or lost."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from diptych.workers.common.errors import DeviceLost
from diptych.workers.core.draft import NO_DRAFT, Draft, ModelDrafts
from diptych.workers.core.draft_kv import DraftKV
from diptych.workers.core.sequence import Batch
from diptych.workers.core.sequence import Sequence as Seq
from diptych.workers.execution.draft.device_draft import DeviceDraft

FULL = torch.OutOfMemoryError("CUDA out of memory")
LOST = torch.AcceleratorError("CUDA error: unspecified launch failure")
OTHER = ValueError("neither")


class Failing:
    """A DraftingModel that fails with `error`, if there is one."""

    num_anew = 3

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.sealed: list[Any] = []

    def attach(self, kv: DraftKV | None) -> None:
        if kv is not None:
            kv.on_seal = self._seal

    def may_draft(self, sequence: Seq) -> bool:
        return True

    def propose(self, wanted: Sequence[tuple[Seq, int]]) -> ModelDrafts:
        self._fail()
        return ModelDrafts([Draft([1], [0.5]) for _ in wanted], [0.1])

    def computed(self, batch: Batch) -> None:
        self._fail()

    def verified(self, sequence: Seq, num_accepted: int) -> None: ...

    def ended(self, sequence: Seq) -> None: ...

    def _seal(self, sequence: Seq) -> None:
        self._fail()
        self.sealed.append(sequence)

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


class Account:
    """The part of a DraftKV that is attached to."""

    on_seal: Any = None


def test_a_full_device_drafts_nothing_and_a_lost_one_is_told_by_name() -> None:
    own, kv, sequence, batch = Failing(), Account(), cast(Seq, object()), cast(Batch, object())
    draft = DeviceDraft(own)
    draft.attach(cast(DraftKV, kv))
    assert draft.propose([(sequence, 2)]).drafts == [Draft([1], [0.5])]
    kv.on_seal(sequence)
    assert own.sealed == [sequence]
    own.error = FULL
    assert draft.propose([(sequence, 2), (sequence, 1)]).drafts == [NO_DRAFT] * 2
    draft.computed(batch)
    kv.on_seal(sequence)
    for error, expected in ((LOST, DeviceLost), (OTHER, ValueError)):
        own.error = error
        for work in (
            lambda: draft.propose([(sequence, 2)]),
            lambda: draft.computed(batch),
            lambda: kv.on_seal(sequence),
        ):
            with pytest.raises(expected):
                work()
    assert draft.num_anew == 3 and draft.may_draft(sequence) and own.sealed == [sequence]
