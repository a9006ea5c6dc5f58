"""Radix tree of full blocks: finds the blocks that already hold a prompt's prefix. Knows no tensor.

A node is one full block, named by the hash of its tokens and of its parent's name, so a name stands for the whole
prefix. The tree holds no references: a block that only the tree knows is evictable (see block_manager.py), and blocks
leave oldest first, children before parents, because sequences release their last block first.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b

from .block_manager import BlockManager
from .sequence import Sequence

HASH_BYTES = 16
ROOT = -1
NO_NAME = b""


def block_hashes(
    token_ids: SequenceOf[int], block_size: int, salt: bytes = b"", start: SequenceOf[bytes] = ()
) -> list[bytes]:
    """Names of the full blocks of `token_ids`; `start` holds those already known. O(tokens not yet named)."""
    hashes = list(start)
    _extend(hashes, token_ids, block_size, salt)
    return hashes


def _extend(hashes: list[bytes], token_ids: SequenceOf[int], block_size: int, salt: bytes) -> None:
    parent = hashes[-1] if hashes else blake2b(b"diptych.prefix" + salt, digest_size=HASH_BYTES).digest()
    first, end = len(hashes) * block_size, len(token_ids) // block_size * block_size
    tokens = array("I", token_ids[first:end])
    size = block_size * tokens.itemsize
    data = tokens.tobytes()
    for start in range(0, len(data), size):
        parent = blake2b(parent + data[start : start + size], digest_size=HASH_BYTES).digest()
        hashes.append(parent)


class PrefixCache:
    """Radix tree over one BlockManager. With `enabled=False` it finds and keeps nothing. `whole_blocks`: a sequence can
    take over no block that is not full, from nobody (kv/dtypes.py, is_rounded_by_block)."""

    def __init__(
        self, manager: BlockManager, block_size: int, *, enabled: bool = True, whole_blocks: bool = False
    ) -> None:
        self.block_size = block_size
        self.enabled = enabled
        self.whole_blocks = whole_blocks
        self._manager = manager
        # A node is its block's id, without an object for each, because the garbage collector's time delays steps.
        self._blocks: dict[bytes, int] = {}
        self._name_of = [NO_NAME] * manager.num_blocks
        self._parent = [ROOT] * manager.num_blocks  # of a block in the tree: its parent's block
        self._num_children = [0] * manager.num_blocks
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []
        manager.on_evict = self._forget
        # Told of a sequence and a position of its table where our block replaced its own.
        self.on_replace: Callable[[Sequence, int], object] = lambda _sequence, _position: None

    def match(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the longest cached prefix, not yet shared: call BlockManager.share on what is used.

        At least one token is left uncovered, for its logits are needed; more where log-probabilities of the prompt are.
        """
        if not self.enabled:
            return []
        self.name(sequence)
        return self.find(sequence.block_hashes[: sequence.max_cached // self.block_size])

    def holds_most(self, sequence: Sequence) -> bool:
        """Return whether `match` can find no more than it does now."""
        return len(self.match(sequence)) == sequence.max_cached // self.block_size

    def find(self, names: SequenceOf[bytes]) -> list[int]:
        """Blocks of the longest cached run of `names`, which begin at a prompt's start; not yet shared."""
        blocks: list[int] = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def holds(self, name: bytes) -> bool:
        return name in self._blocks

    def insert(self, sequence: Sequence, first_block: int) -> None:
        """Add the full, computed blocks of `sequence` from position `first_block` on, as far as their KV is exact.

        Where another sequence stored the same prefix first, its block replaces ours, so that every sequence that
        holds a node also holds the node's ancestors.
        """
        if not self.enabled:
            return
        self.name(sequence)
        names, table = sequence.block_hashes, sequence.block_table
        for i in range(first_block, min(sequence.num_computed, sequence.num_exact) // self.block_size):
            name, block = names[i], table[i]
            known = self._blocks.get(name)
            if known is None:
                self._blocks[name] = block
                self._name_of[block] = name
                self._parent[block] = parent = self._blocks[names[i - 1]] if i else ROOT
                if parent != ROOT:
                    self._num_children[parent] += 1
                self._manager.mark_cached(block)
                self._stored.append(name)
                end = (i + 1) * self.block_size
                if sequence.num_cached < end <= sequence.num_prompt:  # not of a block that was pulled whole
                    sequence.num_stored += min(end - sequence.num_cached, self.block_size)
            elif known != block:
                self._manager.share((known,))
                self._manager.release((block,))
                table[i] = known
                self.on_replace(sequence, i)

    def clear(self) -> None:
        """Forget everything; held blocks stay with their holders."""
        self._removed.extend(self._blocks)
        self._blocks.clear()
        self._name_of = [NO_NAME] * self._manager.num_blocks
        self._num_children = [0] * self._manager.num_blocks
        self._manager.forget_cached()

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """Names of blocks that were added and of those that were removed since the last call. No name is in both."""
        stored, removed = self._stored, self._removed
        self._stored, self._removed = [], []
        if stored and removed:
            stored = [name for name in stored if name in self._blocks]
            removed = [name for name in removed if name not in self._blocks]
        return stored, removed

    def names(self) -> list[bytes]:
        """Names of all cached blocks: the snapshot that a new router starts from."""
        return list(self._blocks)

    def check_integrity(self) -> None:
        """Assert the tree's invariants (our bugs, never a user's)."""
        named = {block: name for block, name in enumerate(self._name_of) if name != NO_NAME}
        assert named == {block: name for name, block in self._blocks.items()}
        assert len(named) == self._manager.num_cached
        children = Counter(self._parent[block] for block in named)
        for block in named:
            assert self._parent[block] == ROOT or self._parent[block] in named
            assert self._num_children[block] == children[block]

    def name(self, sequence: Sequence) -> None:
        """Fill in `block_hashes`. O(blocks not yet named)."""
        if len(sequence.block_hashes) < sequence.num_tokens // self.block_size:
            _extend(sequence.block_hashes, sequence.token_ids, self.block_size, sequence.request.cache_salt)

    def _forget(self, block: int) -> None:
        name = self._name_of[block]
        self._name_of[block] = NO_NAME
        del self._blocks[name]
        assert not self._num_children[block], "a block was evicted before its children"
        parent = self._parent[block]
        if parent != ROOT:
            self._num_children[parent] -= 1
        self._removed.append(name)
