"""Account of the bounds by which sparse decodes choose blocks (QUEST): for which tokens they stand. No torch.

A decode of a context that is longer than the budget is sparse (core/decoding.py). Prompts, runs of several tokens
and contexts within the budget are computed with all of their context. Drafts, too: they end with the budget.

The backend has bounds of the keys of each block, and a step extends them: `Bounded.tokens` says for how many leading
tokens of each sequence they stand. That is known of a sequence and its table, never of a block alone. So bounds never
outlive what they were computed from: KV that arrived by hand-off, was copied, was computed by prompts and runs, or is
in a block that another sequence had, is read anew by the first sparse step of the sequence that has it now.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import repeat

from ...core.decoding import is_sparse
from ...core.sequence import KNOWN, ScheduledSequence, Sequence

_FEW = 64  # sequences that are kept without a look at which of them are gone
FULL = -1


@dataclass(slots=True)
class _Known:
    table: list[int]  # the sequence's own list: another one means other blocks
    num_tokens: int  # leading ones, whose keys the bounds of their blocks cover
    context_len: int  # of the step that extended them
    step: int


class Bounded:
    """Counts the leading tokens of each sequence whose keys the bounds of their blocks cover. Call it once for each
    step, in the order in which steps are computed."""

    def __init__(self, budget: int, block_size: int) -> None:
        """budget: tokens that a sparse decode attends to; 0: none is sparse, whatever its sequence says."""
        self.budget, self._block_size = budget, block_size
        self._known: dict[Sequence, _Known] = {}
        self._step = 0

    def tokens(self, entries: SequenceOf[ScheduledSequence], previous_entries: SequenceOf[int] = ()) -> list[int]:
        """Number of such tokens of each entry, before its step extends them to the whole context; FULL: it attends to
        all. previous_entries: see TableRows.update."""
        if not self.budget:
            return []
        self._step += 1
        found: list[int] = []
        for entry, previous in zip(entries, previous_entries or repeat(KNOWN), strict=False):
            sequence = entry.sequence
            if previous == KNOWN:
                sparse, context_len = is_sparse(entry), entry.start + 1
            else:
                sparse, context_len = len(sequence.token_ids) >= sequence.sparse_from, len(sequence.token_ids) + 1
            found.append(self._extend(sequence, context_len) if sparse else FULL)
        if len(self._known) > 2 * len(entries) + _FEW:
            self._known = {of: known for of, known in self._known.items() if known.step == self._step}
        return found

    def forget_all(self) -> None:
        """Forget all bounds: what was launched may not have been computed."""
        self._known.clear()

    def _extend(self, sequence: Sequence, context_len: int) -> int:
        """Return how many tokens stand, and note that all will once the step is computed."""
        known, stands = self._known.get(sequence), 0
        # One that extended them beyond what is computed by now was not computed itself.
        if known is not None and known.table is sequence.block_table and known.context_len < context_len:
            stands = known.num_tokens
        # A block that fills may be replaced in the table by an equal one, once that step is recorded.
        num_stable = sequence.num_computed // self._block_size
        is_last_stable = context_len // self._block_size == num_stable
        num_tokens = context_len if is_last_stable else num_stable * self._block_size
        self._known[sequence] = _Known(sequence.block_table, num_tokens, context_len, self._step)
        return stands
