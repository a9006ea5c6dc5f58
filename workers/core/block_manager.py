"""Owns the block ids of one worker's KV cache. Knows no tensor, no token and no request.

Life of a block:

    FREE --allocate--> HELD (references >= 1) --last release--> FREE
                                              --last release, if the prefix cache knows it--> EVICTABLE
    EVICTABLE --share--> HELD          EVICTABLE --allocate, oldest first--> HELD (its cached content is forgotten)

While a step that was launched is under way (`begin_step` to `end_step`), it may still read and write every block that
was in use when it was launched: what is released meanwhile rests, and becomes free or evictable when the step is over.

A block's generation counts its allocations: (block, generation) names one content, so a reader of a reused block can
tell. Leases (open hand-offs) and quarantine (a read that may still be landing) are references with a name of their own.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from ..common.errors import OutOfBlocks


class BlockManager:
    """References and generations of `num_blocks` blocks. Every operation is O(blocks named)."""

    def __init__(self, num_blocks: int, on_first_use: Callable[[int], object] | None = None) -> None:
        """on_first_use: called with each block that is allocated for the first time, in ascending order."""
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._on_first_use = on_first_use
        self.generations = [0] * num_blocks
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_cached = bytearray(num_blocks)
        self._num_cached = 0
        # Oldest release first. Sequences release their last block first, so a child always stands before its parent.
        # Not a dict: to find the first of many that were deleted from its front takes a dict as long as there were.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._leased: Counter[int] = Counter()
        self._quarantined: set[int] = set()
        self._resting: deque[dict[int, None]] = deque()  # by running step: blocks released since it was launched
        self.on_evict: Callable[[int], None] = lambda _: None

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated: free ones and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    def begin_step(self) -> None:
        """Note that a step is launched."""
        self._resting.append({})

    def end_step(self) -> None:
        """Note that the oldest step under way is over, and free what was released before the next one
        was launched."""
        for block in self._resting.popleft():
            self._put_back(block)

    def allocate(self, num: int) -> list[int]:
        """Allocate `num` blocks with one reference each; cached ones are evicted where needed. Raises OutOfBlocks."""
        free, references, generations = self._free, self._references, self.generations
        if num > len(free):
            self._evict(num - len(free), num)
        blocks: list[int] = []
        for _ in range(num):
            block = free.pop()
            assert references[block] == 0
            references[block] = 1
            generations[block] += 1
            if generations[block] == 1 and self._on_first_use is not None:
                self._on_first_use(block)
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each. A block must be held or evictable: a free one has no content to share."""
        for block in blocks:
            if self._references[block] == 0:
                self._wake(block)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each, last block first."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released once too often"
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._resting:
                    self._resting[-1][block] = None
                else:
                    self._put_back(block)

    def lease(self, blocks: Sequence[int]) -> None:
        """Hold `blocks` for an open hand-off."""
        self.share(blocks)
        self._leased.update(blocks)

    def end_lease(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self._leased[block] > 0, f"block {block} is not leased"
            self._leased[block] -= 1
            if self._leased[block] == 0:
                del self._leased[block]
        self.release(blocks)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Keep held `blocks` aside: bytes may still land in them. The caller's reference passes to the quarantine."""
        for block in blocks:
            assert self._references[block] == 1 and block not in self._quarantined
            self._quarantined.add(block)

    def end_quarantine(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._quarantined.remove(block)
        self.release(blocks)

    def mark_cached(self, block: int) -> None:
        """Note that the prefix cache can find this held block."""
        assert self._references[block] > 0
        assert not self._is_cached[block]
        self._is_cached[block] = True
        self._num_cached += 1

    def forget_cached(self) -> None:
        """Free all evictable blocks: the prefix cache was cleared."""
        for block in self._evictable:
            self._free.append(block)
        self._evictable.clear()
        self._is_cached = bytearray(self.num_blocks)
        self._num_cached = 0

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> int:
        """Compare the references with what `holders` (block tables) hold beside leases and quarantine.

        Returns the number of blocks that are referenced and have no holder, or the reverse: 0 unless there is a bug.
        """
        expected: Counter[int] = Counter(self._leased)
        expected.update(self._quarantined)
        for table in holders:
            expected.update(table)
        lists = [self._free, self._evictable, *self._resting]
        idle = set().union(*lists)
        assert len(idle) == sum(len(blocks) for blocks in lists), "a block is in two idle lists"
        return sum(
            1
            for block in range(self.num_blocks)
            if self._references[block] != expected[block] or (self._references[block] == 0) != (block in idle)
        )

    def _put_back(self, block: int) -> None:
        if self._is_cached[block]:
            self._evictable[block] = None
        else:
            self._free.append(block)

    def _wake(self, block: int) -> None:
        """Take a block back into use that is evictable, or that was released while a step is under way."""
        if block in self._evictable:
            del self._evictable[block]
            return
        resting = next((blocks for blocks in self._resting if block in blocks), None)
        assert resting is not None, f"block {block} is free and cannot be shared"
        del resting[block]

    def _evict(self, num: int, num_needed: int) -> None:
        """Evict the `num` blocks that were cached longest ago."""
        if num > len(self._evictable):
            raise OutOfBlocks(
                f"{num_needed} KV blocks are needed, but {self.num_free} of {self.num_blocks} are free: "
                "send fewer requests at once, or give the worker more KV memory (kv_memory_bytes)"
            )
        self._num_cached -= num
        for _ in range(num):
            block, _ = self._evictable.popitem(last=False)
            self._is_cached[block] = False
            self.on_evict(block)
            self._free.append(block)
