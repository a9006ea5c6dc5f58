"""The step after one that is still computed: what decodes in it, and where its prompts go on. Pure.

    decoded in the step under way     ──> decodes on, from the token that it is about to get
    a prompt that ends in it          ──> the same; one that is handed off stops there
    a prompt that does not end in it  ──> goes on after the tokens that it computes (NextChunk)
    came meanwhile, with its KV       ──> joins: its last token is known
    its next token brings a run       ──> is left out, and joins the step after: its grammar says so before it has it

All is as if no sequence stopped by the token that it is about to get: which ends by its length, and which needs a
block, is known before that token is. What turns out to have stopped is left out of what the step yields.
"""

from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..kv.layout import blocks_for
from .sequence import KNOWN, NEVER, Batch, NextChunk, ScheduledSequence, Sequence


@dataclass(slots=True)
class StepAhead:
    """The step after a batch that is under way."""

    decodes: list[ScheduledSequence] = field(default_factory=list[ScheduledSequence])
    previous_entries: list[int] = field(default_factory=list[int])  # of these, see Batch
    growing: list[Sequence] = field(default_factory=list[Sequence])  # that need blocks for it, once for each block
    num_came: int = 0  # of the decodes, the last ones, that are not in the batch under way
    num_runs: int = 0  # of those, the last ones, that have a run
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
        return Batch.of(entries, num_decodes - self.num_runs, copies, self.num_runs, previous_entries)


def follow(
    under_way: Batch, running: Collection[Sequence], block_size: int, num_tokens: int = NEVER
) -> StepAhead | None:
    """Find the step after a batch that is under way, without prompts that are not in it; None where a sequence needs
    the host before it can go on. num_tokens: that those which decode may compute with their runs; each computes one at
    least."""
    found = StepAhead()
    decodes, previous_entries = found.decodes, found.previous_entries
    num_left, num_decoding = 0, under_way.num_decodes + under_way.num_runs
    for i, entry in enumerate(under_way.entries):
        sequence = entry.sequence
        if sequence not in running:
            continue  # it has ended since then
        num_left += 1
        is_decode = i < num_decoding
        if not is_decode:
            num_computed = found.prompts[sequence] = entry.start + entry.num_new
            if not entry.samples:
                found.num_ending += num_computed == len(sequence.token_ids)
                continue
        if not sequence.input_from_previous or (is_decode and sequence.handoff_id is not None):
            return None
        if sequence.provisional is not None or (under_way.num_runs and is_decode and not entry.samples):
            continue  # it waits for its peer once it has this token; or the rest of its run is in a later step
        if len(sequence.token_ids) + 1 < sequence.end and sequence.handoff_id is None:
            if sequence.matcher is not None and sequence.matcher.has_run:
                continue  # it has several tokens then, which are in the step after this one
            decodes.append(_after(entry, is_single=i < under_way.num_decodes))
            previous_entries.append(i)
        else:
            found.num_ending += 1
    if num_left < len(running) and not _join(found, under_way, running, num_tokens):
        return None
    # A sequence has a token more than is known, unless that one is its input.
    found.growing = [
        entry.sequence
        for entry, previous in zip(decodes, previous_entries, strict=True)
        if len(entry.sequence.token_ids) + (previous != KNOWN) > len(entry.sequence.block_table) * block_size
    ]
    for sequence in [entry.sequence for entry in decodes[len(decodes) - found.num_runs :]]:
        num_blocks = blocks_for(len(sequence.token_ids), block_size) - len(sequence.block_table)
        found.growing += [sequence] * (num_blocks - 1)
    return found


def _after(entry: ScheduledSequence, *, is_single: bool) -> ScheduledSequence:
    """Return the entry after one that is sampled. is_single: that one has one token, and its sequence's last."""
    if is_single:
        return entry if type(entry) is ScheduledSequence else ScheduledSequence(entry.sequence, 1)
    return NextChunk(entry.sequence, 1, len(entry.sequence.token_ids))


def _join(found: StepAhead, under_way: Batch, running: Collection[Sequence], num_tokens: int) -> bool:
    """Add the running sequences that decode and are not in the batch under way, those with a run last; False where one
    of them needs the host. One that was begun before its source's answer, and waits for it, has nothing to compute.
    num_tokens: see `follow`."""
    computed = {entry.sequence for entry in under_way.entries}
    came = [s for s in running if s not in computed and s.is_decoding and not (s.provisional is not None and s.is_held)]
    num_spare = max(num_tokens - len(found.decodes) - len(came), 0)
    runs: list[ScheduledSequence] = []
    for sequence in [s for s in came if s.num_uncomputed > 1]:
        num_new = min(sequence.num_uncomputed, 1 + num_spare)
        num_spare -= num_new - 1
        runs.append(ScheduledSequence(sequence, num_new))
    found.num_came, found.num_runs = len(came), len(runs)
    found.decodes += [ScheduledSequence(s, 1) for s in came if s.num_uncomputed == 1] + runs
    found.previous_entries += [KNOWN] * len(came)
    return all(s.input_from_previous and s.handoff_id is None for s in came)
