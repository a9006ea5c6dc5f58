"""Radix tree of full blocks: finds the blocks that already hold a prompt's prefix. Knows no tensor.

A node is one full block, named by the hash of its tokens and of its parent's name, so a name stands for the whole
prefix. The tree holds no references: a block that only the tree knows is evictable (see block_manager.py), and blocks
leave oldest first, children before parents, because sequences release their last block first.
"""

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from blake3 import blake3

from .block_manager import BlockManager
from .sequence import Sequence

HASH_BYTES = 16


def block_hashes(
    token_ids: SequenceOf[int], block_size: int, salt: bytes = b"", start: SequenceOf[bytes] = ()
) -> list[bytes]:
    """Names of the full blocks of `token_ids`; `start` holds those already known. O(tokens not yet named)."""
    hashes = list(start)
    parent = hashes[-1] if hashes else blake3(b"diptych.prefix" + salt).digest(HASH_BYTES)
    for i in range(len(hashes), len(token_ids) // block_size):
        tokens = array("I", token_ids[i * block_size : (i + 1) * block_size]).tobytes()
        parent = blake3(parent + tokens).digest(HASH_BYTES)
        hashes.append(parent)
    return hashes


@dataclass(slots=True)
class _Node:
    block: int
    parent: bytes | None
    children: set[bytes] = field(default_factory=set[bytes])


class PrefixCache:
    """The tree over one BlockManager. `enabled=False` finds and keeps nothing."""

    def __init__(self, manager: BlockManager, block_size: int, *, enabled: bool = True) -> None:
        self.block_size = block_size
        self.enabled = enabled
        self._manager = manager
        self._nodes: dict[bytes, _Node] = {}
        self._name_of: dict[int, bytes] = {}
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []
        manager.on_evict = self._forget

    def match(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the longest cached prefix, not yet shared: call BlockManager.share on what is used.

        At least one token is left uncovered, for its logits are needed.
        """
        if not self.enabled:
            return []
        self._name(sequence)
        return self.find(sequence.block_hashes[: (sequence.num_tokens - 1) // self.block_size])

    def holds_most(self, sequence: Sequence) -> bool:
        """Whether `match` can find no more than it does now."""
        return len(self.match(sequence)) == (sequence.num_tokens - 1) // self.block_size

    def find(self, names: SequenceOf[bytes]) -> list[int]:
        """Blocks of the longest cached run of `names`, which begin at a prompt's start; not yet shared."""
        blocks: list[int] = []
        for name in names:
            node = self._nodes.get(name)
            if node is None:
                break
            blocks.append(node.block)
        return blocks

    def insert(self, sequence: Sequence, first_block: int) -> None:
        """Make findable the full, computed blocks of `sequence` from position `first_block` on.

        Where another sequence stored the same prefix first, its block replaces ours, so that every sequence that
        holds a node also holds the node's ancestors.
        """
        if not self.enabled:
            return
        self._name(sequence)
        for i in range(first_block, sequence.num_computed // self.block_size):
            name, block = sequence.block_hashes[i], sequence.block_table[i]
            node = self._nodes.get(name)
            if node is None:
                parent = sequence.block_hashes[i - 1] if i else None
                self._nodes[name] = _Node(block, parent)
                self._name_of[block] = name
                if parent is not None:
                    self._nodes[parent].children.add(name)
                self._manager.mark_cached(block)
                self._stored.append(name)
            elif node.block != block:
                self._manager.share((node.block,))
                self._manager.release((block,))
                sequence.block_table[i] = node.block

    def clear(self) -> None:
        """Forget everything; held blocks stay with their holders."""
        self._removed.extend(self._nodes)
        self._nodes.clear()
        self._name_of.clear()
        self._manager.forget_cached()

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """Names that became findable and names that ceased to be since the last call. Nobody is in both."""
        stored, removed = self._stored, self._removed
        self._stored, self._removed = [], []
        if stored and removed:
            stored = [name for name in stored if name in self._nodes]
            removed = [name for name in removed if name not in self._nodes]
        return stored, removed

    def names(self) -> list[bytes]:
        """Every findable block's name: the snapshot that a new router starts from."""
        return list(self._nodes)

    def check_integrity(self) -> None:
        """Assert the tree's invariants (our bugs, never a user's)."""
        assert len(self._nodes) == len(self._name_of) == self._manager.num_cached
        for name, node in self._nodes.items():
            assert self._name_of[node.block] == name
            assert node.parent is None or name in self._nodes[node.parent].children

    def _name(self, sequence: Sequence) -> None:
        salt = sequence.request.cache_salt
        if len(sequence.block_hashes) < sequence.num_tokens // self.block_size:
            sequence.block_hashes = block_hashes(sequence.token_ids, self.block_size, salt, sequence.block_hashes)

    def _forget(self, block: int) -> None:
        name = self._name_of.pop(block)
        node = self._nodes.pop(name)
        assert not node.children, "a block was evicted before its children"
        if node.parent is not None:
            self._nodes[node.parent].children.discard(name)
        self._removed.append(name)
