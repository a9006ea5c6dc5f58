"""Index of the KV blocks that each worker's prefix cache holds, by block name (workers/core/prefix_cache.py).

Workers send changes as BlockEvents. A late change costs time, never wrong tokens: the worker checks its own cache.
"""

from collections.abc import Iterable, Sequence

from ...proto import worker_pb2
from ...workers.common.errors import InternalError
from ...workers.core.prefix_cache import HASH_BYTES, block_hashes


class PrefixIndex:
    def __init__(self) -> None:
        self._names: dict[str, set[bytes]] = {}

    def __bool__(self) -> bool:
        return any(self._names.values())

    def apply(self, worker: str, events: worker_pb2.BlockEvents, max_blocks: int) -> None:
        """Apply one worker's changes. O(names sent). Raises InternalError for malformed names, or too many."""
        names = self._names.setdefault(worker, set())
        if events.cleared:
            names.clear()
        if not {HASH_BYTES}.issuperset(map(len, events.stored)):
            raise InternalError(f"a worker sent a block name that does not have {HASH_BYTES} bytes")
        names.difference_update(events.removed)
        names.update(events.stored)
        if len(names) > max_blocks:
            raise InternalError(f"a worker with {max_blocks} blocks reports {len(names)} cached blocks")

    def drop(self, worker: str) -> None:
        self._names.pop(worker, None)

    def cached_tokens(self, token_ids: Sequence[int], block_sizes: Iterable[int], salt: bytes) -> dict[str, int]:
        """Number of leading tokens that each worker holds, of those that hold any. Blocks of different sizes have
        different names: a name is made of the block's tokens."""
        cached: dict[str, int] = {}
        for block_size in block_sizes:
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
        for worker, names in self._names.items():
            if first in names:
                # Often a worker holds as many as another: of a prompt that many requests begin with.
                if hashes[num - 1] not in names or (num <= last and hashes[num] in names):
                    num = _num_leading(names, hashes)
                found[worker] = num
        return found


def _num_leading(names: set[bytes], hashes: Sequence[bytes]) -> int:
    """Number of leading hashes in `names`, by bisection. hashes[0] must be in it."""
    low, high = 1, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] in names:
            low = middle + 1
        else:
            high = middle
    return low
