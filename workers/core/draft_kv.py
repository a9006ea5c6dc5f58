"""DraftKV: which blocks hold the KV of the model that drafts, beside the target's. Knows no tensor.

The draft layers are the last ones of the same blocks (KVLayout.num_draft_layers), so a block table, a copy, a prefix
and a hand-off hold both. But a block may come without them: from a worker that has no such model, or from steps that
did not compute it. So each block has a mark, of its generation, once the draft's KV of all its slots is in it, and each
sequence counts its leading tokens that have theirs (Sequence.num_draft_computed <= num_computed).
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from .block_manager import BlockManager
from .sequence import Sequence


class DraftKV:
    def __init__(self, manager: BlockManager, block_size: int) -> None:
        self._generations, self._block_size = manager.generations, block_size
        self._marks = [0] * manager.num_blocks  # generation whose draft KV is whole; 0: none
        self.on_seal: Callable[[Sequence], object] = lambda _: None  # computes what is missing before a hand-off

    def has(self, block: int) -> bool:
        return self._marks[block] == self._generations[block]

    def num_leading(self, blocks: SequenceOf[int]) -> int:
        """Number of tokens in the leading blocks that have the draft's KV. O(blocks)."""
        num = next((i for i, block in enumerate(blocks) if not self.has(block)), len(blocks))
        return num * self._block_size

    def found(self, sequence: Sequence) -> None:
        """Count what a sequence's blocks hold: they come from the prefix cache. O(blocks)."""
        num_full = sequence.num_computed // self._block_size
        sequence.num_draft_computed = self.num_leading(sequence.block_table[:num_full])

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that the draft's KV of a sequence's first `num_tokens` is computed."""
        size, before = self._block_size, sequence.num_draft_computed
        sequence.num_draft_computed = num_tokens
        for block in sequence.block_table[before // size : num_tokens // size]:
            self._marks[block] = self._generations[block]

    def received(self, sequence: Sequence, num_held: int, num_draft_computed: int) -> None:
        """Note KV that arrived with a hand-off: the draft's of `num_draft_computed` leading tokens, but for the first
        `num_held`, which were here before, in full blocks."""
        size, num = self._block_size, min(num_draft_computed, sequence.num_computed)
        for block in sequence.block_table[num_held // size : num_draft_computed // size]:
            self._marks[block] = self._generations[block]
        self.found(sequence)
        if num >= num_held and sequence.num_draft_computed == num // size * size:
            sequence.num_draft_computed = num  # its last block arrived, too

    def replaced(self, sequence: Sequence, position: int) -> None:
        """Note that the prefix cache has put its own block into a sequence's table."""
        if not self.has(sequence.block_table[position]):
            sequence.num_draft_computed = min(sequence.num_draft_computed, position * self._block_size)
