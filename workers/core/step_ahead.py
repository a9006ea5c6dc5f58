"""The step after one that is still computed: what decodes in it, and where its prompts go on. Pure.

    decoded in the step under way     ──> decodes on, from the token that it is about to get
    a prompt that ends in it          ──> the same; one that is handed off stops there
    a prompt that does not end in it  ──> goes on after the tokens that it computes (NextChunk)
    came meanwhile, with its KV       ──> joins: its last token is known

All is as if no sequence stopped by the token that it is about to get: which ends by its length, and which needs a
block, is known before that token is. What turns out to have stopped is left out of what the step yields.
"""

from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .sequence import KNOWN, Batch, NextChunk, ScheduledSequence, Sequence


@dataclass(slots=True)
class StepAhead:
    """The step after a batch that is under way."""

    decodes: list[ScheduledSequence] = field(default_factory=list[ScheduledSequence])
    previous_entries: list[int] = field(default_factory=list[int])  # of these, see Batch
    growing: list[Sequence] = field(default_factory=list[Sequence])  # that need a block more for it
    num_came: int = 0  # of the decodes, the last ones, that are not in the batch under way
    num_ending: int = 0  # running sequences that end with the batch under way
    # Prompts of the batch under way, and how many tokens of each are computed then.
    prompts: dict[Sequence, int] = field(default_factory=dict[Sequence, int])

    @contextmanager
    def recorded(self) -> Generator[None]:
        """Let prompts of the batch under way look as they will when it is recorded."""
        before = [(sequence, sequence.num_computed) for sequence in self.prompts]
        for sequence, num_computed in self.prompts.items():
            sequence.num_computed = num_computed
        try:
            yield
        finally:
            for sequence, num_computed in before:
                sequence.num_computed = num_computed

    def batch(self, entries: list[ScheduledSequence], copies: list[tuple[int, int]]) -> Batch:
        """Make the batch. entries: the decodes, and chunks of prompts, which were made while these were `recorded`."""
        num_decodes, starts = len(self.decodes), self.prompts
        for i, entry in enumerate(entries[num_decodes:], num_decodes):
            if entry.sequence in starts:
                entries[i] = NextChunk(entry.sequence, entry.num_new, starts[entry.sequence])
        previous_entries = self.previous_entries + [KNOWN] * (len(entries) - num_decodes)
        return Batch.of(entries, num_decodes, copies, previous_entries=previous_entries)


def follow(under_way: Batch, running: Collection[Sequence], block_size: int) -> StepAhead | None:
    """Find the step after a batch that is under way, without prompts that are not in it; None where a sequence needs
    the host before it can go on."""
    found = StepAhead()
    decodes, previous_entries = found.decodes, found.previous_entries
    num_left = 0
    for i, entry in enumerate(under_way.entries):
        sequence = entry.sequence
        if sequence not in running:
            continue  # it has ended since then
        num_left += 1
        is_decode = i < under_way.num_decodes
        if not is_decode:
            num_computed = found.prompts[sequence] = entry.start + entry.num_new
            if not entry.samples:
                found.num_ending += num_computed == len(sequence.token_ids)
                continue
        if not sequence.input_from_previous or (is_decode and sequence.handoff_id is not None):
            return None
        if sequence.provisional is not None:
            continue  # it waits for its peer once it has this token
        if len(sequence.token_ids) + 1 < sequence.end and sequence.handoff_id is None:
            if is_decode:
                decodes.append(entry if type(entry) is ScheduledSequence else ScheduledSequence(sequence, 1))
            else:
                decodes.append(NextChunk(sequence, 1, len(sequence.token_ids)))
            previous_entries.append(i)
        else:
            found.num_ending += 1
    if num_left < len(running) and not _join(found, under_way, running):
        return None
    # A sequence has a token more than is known, unless that one is its input.
    found.growing = [
        entry.sequence
        for entry, previous in zip(decodes, previous_entries, strict=True)
        if len(entry.sequence.token_ids) + (previous != KNOWN) > len(entry.sequence.block_table) * block_size
    ]
    return found


def _join(found: StepAhead, under_way: Batch, running: Collection[Sequence]) -> bool:
    """Add the running sequences that decode and are not in the batch under way; False where one of them needs the host.
    One that was begun before its source's answer, and waits for it, has nothing to compute."""
    computed = {entry.sequence for entry in under_way.entries}
    came = [s for s in running if s not in computed and s.is_decoding and not (s.provisional is not None and s.is_held)]
    found.num_came = len(came)
    found.decodes += [ScheduledSequence(s, 1) for s in came]
    found.previous_entries += [KNOWN] * len(came)
    return all(s.num_uncomputed == 1 and s.input_from_previous and s.handoff_id is None for s in came)
