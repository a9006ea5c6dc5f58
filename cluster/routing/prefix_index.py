"""Index of the KV blocks that each worker's prefix cache holds, by block name (workers/core/prefix_cache.py).

Workers send changes as BlockEvents. A late change costs time, never wrong tokens: the worker checks its own cache.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ...proto import worker_pb2
from ...workers.common.errors import InternalError
from ...workers.core.prefix_cache import HASH_BYTES, block_hashes

Keys = npt.NDArray[np.uint64]

MAX_BLOCKS = 10_000_000  # of all workers: about 300 MB
THINNED_PARTS = 8  # one of so many parts of a worker's names goes at a time
MIN_RECENT = 1024  # names that are kept as they came
RECENT_SHARE = 8  # a table has so many times more keys than there are recent changes
_HALF = np.uint64(32)


class PrefixIndex:
    """Names of at most about `max_blocks` blocks, at about 30 bytes each (benchmarks/serving/prefix_index.py). Where
    workers hold more, the worker with the most names loses an eighth of them, until the rest fits: a name that is not
    here costs a prompt that is computed, never a wrong route."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._names: dict[str, BlockSet] = {}
        self._num_blocks = 0
        self._next_part = 0

    def __bool__(self) -> bool:
        return any(self._names.values())

    def __len__(self) -> int:
        """Count the names that are kept, over all workers."""
        return self._num_blocks

    @property
    def num_table_bytes(self) -> int:
        """Bytes of all tables; recent changes come on top, with about 100 bytes a name."""
        return sum(names.num_table_bytes for names in self._names.values())

    def apply(self, worker: str, events: worker_pb2.BlockEvents, max_blocks: int) -> None:
        """Apply one worker's changes. O(names sent). Raises InternalError for malformed names, or too many."""
        names = self._names.get(worker)
        if names is None or events.cleared:
            self.drop(worker)
            names = self._names[worker] = BlockSet()
        num_before = len(names)
        stored, removed = events.stored[:], events.removed[:]
        if not {HASH_BYTES}.issuperset(map(len, stored)) or not {HASH_BYTES}.issuperset(map(len, removed)):
            raise InternalError(f"a worker sent a block name that does not have {HASH_BYTES} bytes")
        if removed:
            names.remove(removed)
        if stored:
            names.add(stored)
            if len(names) > max_blocks:
                names.settle()  # it may have sent names again
        self._num_blocks += len(names) - num_before
        if len(names) > max_blocks:
            raise InternalError(f"a worker with {max_blocks} blocks reports {len(names)} cached blocks")
        while self._num_blocks > self._max_blocks:
            self._thin()

    def drop(self, worker: str) -> None:
        """Forget a worker and free its memory. Idempotent."""
        names = self._names.pop(worker, None)
        if names is not None:
            self._num_blocks -= len(names)

    def _thin(self) -> None:
        """Forget a part of the names of the worker that has the most."""
        most = max(self._names.values(), key=len)
        num_before = len(most)
        most.thin(self._next_part, THINNED_PARTS)
        self._next_part = (self._next_part + 1) % THINNED_PARTS
        self._num_blocks += len(most) - num_before

    def cached_tokens(self, token_ids: Sequence[int], block_sizes: Iterable[int], salt: bytes) -> dict[str, int]:
        """Number of leading tokens that each worker holds, of those that hold any. Blocks of different sizes have
        different names: a name is made of the block's tokens."""
        cached: dict[str, int] = {}
        for block_size in block_sizes if self else ():
            held = self.match(block_hashes(token_ids, block_size, salt))
            cached |= {worker: num_blocks * block_size for worker, num_blocks in held.items()}
        return cached

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Number of leading `hashes` that each worker holds, of those that hold any. O(workers x log hashes): a worker
        that holds a block holds all before it, because children are evicted first."""
        if not hashes:
            return {}
        found: dict[str, int] = {}
        first, last, num = hashes[0], len(hashes) - 1, 1
        key = key_of(first)
        place = key >> 32
        for worker, names in self._names.items():
            # Most workers hold nothing of it, and the place in their tables shows that.
            if first in names.recent or (names.table[place * names.num_slots >> 32] and names.keeps(first, key)):
                # Often a worker holds as many as another: of a prompt that many requests begin with.
                if hashes[num - 1] not in names or (num <= last and hashes[num] in names):
                    num = _num_leading(names, hashes)
                found[worker] = num
        return found


class BlockSet:
    """Compact set of names: about 30 bytes for each, where a set of bytes objects takes 100.

        add, remove ─> recent, removed (sets of names) ── settle, when they hold an eighth ──> table of 64-bit keys

    A key is the first 8 bytes of a name, which is a hash. So a name that was never added is found with a probability of
    len / 2**64: the worker that is then believed to hold a block finds in its own cache that it does not. Keys lie in
    one array, in ascending order, each at or after the place that its upper 32 bits give: a sorted table with linear
    probing (Amble and Knuth, Ordered hash tables, 1974), which numpy fills without a loop. `len` is exact where no name
    is added twice, and none is removed that was not there; `settle` makes it exact."""

    __slots__ = ("_num_gone", "_num_kept", "_removed", "num_slots", "recent", "table")

    def __init__(self) -> None:
        self.recent: set[bytes] = set()  # added since the table was filled
        self._removed: set[bytes] = set()  # since then
        self._num_gone = 0  # of the table's keys, removed since then
        self.num_slots = 0  # places of the table that keys' upper bits give
        self.table = memoryview(b"")  # of uint64; 0: a free slot
        self._fill(np.zeros(0, np.uint64))

    def __len__(self) -> int:
        return max(self._num_kept + len(self.recent) - self._num_gone, 0)

    def __contains__(self, name: bytes) -> bool:
        return name in self.recent or self.keeps(name, key_of(name))

    @property
    def num_table_bytes(self) -> int:
        return self.table.nbytes

    def keeps(self, name: bytes, key: int) -> bool:
        """Return whether the table holds `name`, whose key is `key`. About 0.2 µs."""
        slot = (key >> 32) * self.num_slots >> 32
        found = self.table[slot]
        while found:
            if found >= key:
                return found == key and name not in self._removed
            slot += 1
            found = self.table[slot]
        return False

    def add(self, names: Sequence[bytes]) -> None:
        if len(names) > self._most_recent:
            self._settle(names)
        else:
            self.recent.update(names)
            self._settle_if_due()

    def remove(self, names: Sequence[bytes]) -> None:
        num_recent = len(self.recent)
        self.recent.difference_update(names)
        if self._num_kept:
            self._removed.update(names)
            self._num_gone += len(names) - num_recent + len(self.recent)
            self._settle_if_due()

    def settle(self) -> None:
        """Move the recent changes into the table. O(len)."""
        self._settle(())

    def _settle(self, names: Sequence[bytes]) -> None:
        """Move the recent changes, and `names`, into the table."""
        kept = _without(self._keys(), _keys_of(self._removed)) if self._removed else self._keys()
        added = [np.sort(_keys_of(some)) for some in (self.recent, names) if some]
        if added:
            kept = np.sort(np.concatenate([kept, *added]), kind="stable")  # merges runs that are in order
            kept = kept[np.concatenate([[True], kept[1:] != kept[:-1]])]
        self.recent, self._removed, self._num_gone = set(), set(), 0
        self._fill(kept)

    def thin(self, part: int, num_parts: int) -> None:
        """Forget one of `num_parts` parts of the names, as their hashes choose it."""
        self.settle()
        keys = self._keys()
        self._fill(keys[keys % np.uint64(num_parts) != part])

    def _settle_if_due(self) -> None:
        if len(self.recent) + len(self._removed) > self._most_recent:
            self.settle()

    @property
    def _most_recent(self) -> int:
        return max(MIN_RECENT, self._num_kept // RECENT_SHARE)

    def _keys(self) -> Keys:
        """Keys in the table, in order: uint64 [num]."""
        slots = np.frombuffer(self.table, np.uint64)
        return slots[slots != 0]

    def _fill(self, keys: Keys) -> None:
        """Make the table anew. keys: uint64 [num], in order, each once, none of them 0."""
        num = len(keys)
        self._num_kept, self.num_slots = num, num * 4 // 3 + 1
        number = np.arange(num, dtype=np.int64)
        homes = ((keys >> _HALF) * np.uint64(self.num_slots) >> _HALF).astype(np.int64)
        places = np.maximum.accumulate(homes - number) + number if num else number
        table = np.zeros(max(self.num_slots, int(places[-1]) + 1 if num else 0) + 1, np.uint64)  # ends with a 0
        table[places] = keys
        self.table = table.data


def _num_leading(names: BlockSet, hashes: Sequence[bytes]) -> int:
    """Number of leading hashes in `names`, by bisection. hashes[0] must be in it."""
    low, high = 1, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] in names:
            low = middle + 1
        else:
            high = middle
    return low


def key_of(name: bytes) -> int:
    """Key of a name. Never 0, which marks a free slot."""
    return int.from_bytes(name[:8], "little") or 1


def _keys_of(names: Collection[bytes]) -> Keys:
    """Keys of names of one length, a multiple of 8: uint64 [num]."""
    size = len(next(iter(names)))
    return np.maximum(np.frombuffer(b"".join(names), "<u8")[:: size // 8], np.uint64(1))


def _without(keys: Keys, gone: Keys) -> Keys:
    """Return keys that are not in `gone`. keys: uint64 [num], in order; gone: uint64 [num_gone]."""
    places = np.searchsorted(keys, gone)
    found = places[(places < len(keys))]
    found = found[keys[found] == gone[places < len(keys)]]
    is_kept = np.ones(len(keys), np.bool_)
    is_kept[found] = False
    return keys[is_kept]
