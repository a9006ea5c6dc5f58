"""Prompts that several sequences have in common are computed once. Block bookkeeping only.

    a sequence is admitted   ──> it claims the names of the blocks that it will fill, and its prompt's end
    another needs these next ──> it is parked (waiting_queue.py) until the last that it shares is computed
    it is computed           ──> in line again; the prefix cache holds the full blocks

Where the KV is not computed here but on its way from another worker, which may be stuck, the other waits no longer than
it can without being late.

The end of a prompt rarely fills a block. Whoever was parked for the same whole prompt, as the other completions of
n > 1 are, gets a copy of that last block and computes one token (copy on write, once: PagedAttention §4.4). Until they
have it, the blocks are held for them here, unless memory runs short: then they compute the rest; and so they do where
only full blocks can be copied.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass

from ..kv.layout import blocks_for
from .block_manager import BlockManager
from .prefix_cache import PrefixCache
from .sequence import Sequence, SequenceStatus
from .waiting_queue import WaitingQueue

LEAST_TAIL_TOKENS = 2  # to wait and to copy for


@dataclass(slots=True)
class _Claim:
    first_block: int  # position in the table, of the next one to be computed
    end_block: int
    num_tokens: int  # of the prompt
    tail: Hashable | None  # names its end


@dataclass(slots=True, eq=False)
class _Tail:
    """A computed prompt, held for those that have the same."""

    blocks: list[int]  # all, for who holds a block of the cache's tree holds its ancestors
    num_left: int  # sequences


class SharedPrompts:
    def __init__(self, manager: BlockManager, cache: PrefixCache, queue: WaitingQueue) -> None:
        self._manager = manager
        self._cache = cache
        self._queue = queue
        self._computing: dict[Hashable, Sequence] = {}  # by name, of a block or a prompt's end
        self._claims: dict[Sequence, _Claim] = {}
        self._tails: dict[Sequence, _Tail] = {}

    def park(self, sequence: Sequence, num_cached: int, beside: Sequence | None = None) -> bool:
        """Return whether what the next waiting `sequence` needs after its cached blocks is being computed, or is more
        than half of what the unfinished prompt `beside` lacks. Then it is parked; not if it was preempted: that one
        comes first."""
        if self._queue.is_preempted(sequence):
            return False
        if self._computing and self._park_for_blocks(sequence, num_cached):
            return True
        num_new = sequence.num_tokens - num_cached * self._cache.block_size
        if beside is None or num_new <= beside.num_uncomputed // 2:
            return False
        self._queue.park(beside)
        return True

    def _park_for_blocks(self, sequence: Sequence, num_cached: int) -> bool:
        names, num_whole = sequence.block_hashes, sequence.max_cached // self._cache.block_size
        is_late = self._queue.now >= sequence.due
        shared: Hashable | None = None
        for i in range(num_cached, num_whole):
            if not self._is_worth_waiting(names[i], is_late):
                break
            shared = names[i]
        else:
            takes_tail = sequence.max_cached == sequence.num_tokens - 1 and sequence not in self._tails
            tail = self._tail_of(sequence) if takes_tail else None
            shared = tail if self._is_worth_waiting(tail, is_late) else shared
        if shared is not None:
            if not is_late:
                self._computing[shared].gives_way_until = 0.0
            self._queue.park(shared, math.inf if is_late else sequence.due)
        return shared is not None

    def _is_worth_waiting(self, name: Hashable | None, is_late: bool) -> bool:
        """Return whether it is computed here, or is on its way, for which a late sequence does not wait."""
        claimant = self._computing.get(name)
        return claimant is not None and not (is_late and claimant.status is SequenceStatus.IMPORTING)

    def computes(self, sequence: Sequence) -> None:
        """Claim what an admitted sequence will compute. O(blocks of its prompt)."""
        if not self._cache.enabled:
            return
        block_size = self._cache.block_size
        first, end = sequence.num_computed // block_size, sequence.num_tokens // block_size
        tail = self._tail_of(sequence) if sequence.num_uncomputed > 1 else None
        if first < end or tail is not None:
            for name in sequence.block_hashes[first:end]:
                self._claim(name, sequence)
            if tail is not None:
                self._claim(tail, sequence)
            self._claims[sequence] = _Claim(first, end, sequence.num_tokens, tail)

    def computed(self, sequence: Sequence) -> None:
        """Let those go on that waited for what it has computed. O(1) plus what is new."""
        claim = self._claims.get(sequence)
        if claim is None:
            return
        end = min(sequence.num_computed // self._cache.block_size, claim.end_block)
        for i in range(claim.first_block, end):
            self._unclaim(sequence, sequence.block_hashes[i])
        claim.first_block = max(end, claim.first_block)
        if sequence.num_computed >= claim.num_tokens:
            del self._claims[sequence]
            if claim.tail is not None:
                self._keep_tail(sequence, claim)
        elif sequence.is_decoding:  # it was preempted or resumed, and its last token is left: it prefills no more
            self._drop(sequence, claim)

    def stopped(self, sequence: Sequence) -> None:
        """Drop the claims of a sequence that computes no more; it still has its blocks."""
        self.computed(sequence)
        claim = self._claims.get(sequence)
        if claim is not None:
            self._drop(sequence, claim)

    def take_blocks(self, sequence: Sequence, cached: list[int], copies: list[tuple[int, int]]) -> bool:
        """Allocate blocks for all its tokens, after the `cached` ones, and note in `copies` what is to be copied into
        them; False: there are too few."""
        block_size, manager = self._cache.block_size, self._manager
        # Share the blocks before the allocation, which could otherwise evict them.
        manager.share(cached)
        num_needed = blocks_for(sequence.num_tokens, block_size) - len(cached)
        if num_needed > manager.num_free:
            self.drop_tails()
        if num_needed > manager.num_free:
            manager.release(cached)
            return False
        sequence.block_table = cached + manager.allocate(num_needed)
        sequence.num_computed = len(cached) * block_size
        tail = self.take_tail(sequence)
        if tail is not None:
            copies.append((tail, sequence.block_table[len(cached)]))
            sequence.num_computed = sequence.num_tokens - 1
        return True

    def take_tail(self, sequence: Sequence) -> int | None:
        """The block that holds the end of its prompt, which then is its caller's to release; None: there is none, or it
        is of no use without the blocks before. The sequence has its blocks, and counts as computed what it shares."""
        tail = self._tails.get(sequence)
        if tail is None:
            return None
        num_whole = self._num_whole(sequence)
        block = tail.blocks[num_whole] if sequence.num_computed == num_whole * self._cache.block_size else None
        if block is not None:
            self._manager.share((block,))
        self.forget(sequence)
        return block

    def has_tail(self, sequence: Sequence) -> bool:
        """Return whether it is to get a copy of the end of its prompt."""
        return sequence in self._tails

    def forget(self, sequence: Sequence) -> None:
        """Drop what is held for a sequence that no longer waits."""
        tail = self._tails.pop(sequence, None)
        if tail is not None:
            tail.num_left -= 1
            if tail.num_left == 0:
                self._manager.release(tail.blocks)

    def drop_tails(self) -> None:
        """Release what is held for later, because memory is short."""
        for sequence in list(self._tails):
            self.forget(sequence)

    def held_blocks(self) -> list[int]:
        return [block for tail in set(self._tails.values()) for block in tail.blocks]

    def _drop(self, sequence: Sequence, claim: _Claim) -> None:
        """End what is left of a claim."""
        del self._claims[sequence]
        for name in sequence.block_hashes[claim.first_block : claim.end_block]:
            self._unclaim(sequence, name)
        self._unclaim(sequence, claim.tail)

    def _keep_tail(self, sequence: Sequence, claim: _Claim) -> None:
        followers = self._unclaim(sequence, claim.tail)
        if followers:
            num_blocks = (claim.num_tokens - 1) // self._cache.block_size + 1
            tail = _Tail(sequence.block_table[:num_blocks], len(followers))
            self._manager.share(tail.blocks)
            self._tails |= dict.fromkeys(followers, tail)

    def _claim(self, name: Hashable, sequence: Sequence) -> None:
        """Note that `sequence` makes what has this name. One that computes it replaces one that imports it."""
        claimant = self._computing.setdefault(name, sequence)
        if claimant.status is SequenceStatus.IMPORTING and sequence.status is not SequenceStatus.IMPORTING:
            self._computing[name] = sequence

    def _unclaim(self, sequence: Sequence, name: Hashable | None) -> list[Sequence]:
        """End the claim, and unpark the sequences that waited for it: returns them."""
        if name is None or self._computing.get(name) is not sequence:
            return []
        del self._computing[name]
        return self._queue.unpark(name)

    def _num_whole(self, sequence: Sequence) -> int:
        """Number of blocks that it could share: its last token is computed, for the logits."""
        return (sequence.num_tokens - 1) // self._cache.block_size

    def _tail_of(self, sequence: Sequence) -> Hashable | None:
        """Name of all its tokens but the last; None where sharing gains nothing."""
        num_whole = self._num_whole(sequence)
        tail = tuple(sequence.token_ids[num_whole * self._cache.block_size : -1])
        if len(tail) < LEAST_TAIL_TOKENS or self._cache.whole_blocks:
            return None
        parent = sequence.block_hashes[num_whole - 1] if num_whole else b""
        return parent, sequence.request.cache_salt, tail


class BlockShortage:
    """The sequence for which there were too few blocks. It is not looked up anew in every step."""

    def __init__(self, manager: BlockManager, cache: PrefixCache) -> None:
        self._manager = manager
        self._cache = cache
        self._stuck: tuple[Sequence, int, bytes | None] | None = None

    def note(self, sequence: Sequence, num_cached: int) -> None:
        """Note that blocks are missing after so many cached ones."""
        missing = sequence.block_hashes[num_cached : sequence.max_cached // self._cache.block_size]
        self._stuck = sequence, self._manager.num_free, missing[0] if missing else None

    def holds(self, sequence: Sequence) -> bool:
        """Return whether it still lacks blocks: none have come free since, and it can share no more."""
        if self._stuck is None:
            return False
        stuck, num_free, missing = self._stuck
        if stuck is sequence and self._manager.num_free <= num_free and not (missing and self._cache.holds(missing)):
            return True
        self._stuck = None
        return False
