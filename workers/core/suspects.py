"""Sequences that are computed alone at first, because steps failed with them before. Pure.

    add ──tokens made──> as any other              a step that fails meanwhile shows which sequence is the cause
     └─ discard (finished, failed, aborted)

They have every other step, so that neither they nor the others wait for long. Their router says how many tokens each
makes alone (`Submit.num_alone`).
"""

from collections.abc import Container

from .sequence import Batch, ScheduledSequence, Sequence


class Suspects:
    def __init__(self) -> None:
        self.sequences: dict[Sequence, None] = {}  # to be read; most of the time there are none
        self._had_turn = False

    def __contains__(self, sequence: object) -> bool:
        return sequence in self.sequences

    def add(self, sequence: Sequence) -> None:
        """Add the sequence if it is to be computed alone."""
        if sequence.num_alone:
            self.sequences[sequence] = None

    def discard(self, sequence: Sequence) -> None:
        self.sequences.pop(sequence, None)
        self._had_turn &= bool(self.sequences)

    def computed(self, batch: Batch) -> None:
        """Count a batch that succeeded; call it before its tokens are accepted."""
        for entry in batch.entries:
            if entry.sequence in self.sequences and entry.samples:
                entry.sequence.num_alone -= 1
                if not entry.sequence.num_alone:
                    self.discard(entry.sequence)

    def take_turn(self) -> bool:
        """Take turns: whether this step is for a suspect."""
        self._had_turn = bool(self.sequences) and not self._had_turn
        return self._had_turn

    def left_out_of(self, entries: list[ScheduledSequence]) -> list[ScheduledSequence]:
        return [e for e in entries if e.sequence not in self.sequences]

    def first(self, running: Container[Sequence]) -> Sequence | None:
        """The next suspect that runs and does not wait for a peer."""
        return next((s for s in self.sequences if s in running and not s.is_held), None)
