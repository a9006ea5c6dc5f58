"""The hand-off of a running sequence: how many blocks its sink reserves, and when its source stops. Pure.

    offer ──the sink reads what there was──> it follows what is made meanwhile ──near, or no nearer──> seal
       └── `slack_tokens` made since the offer: the sequence waits for its sink

Workers act by it; routers reckon with the same numbers (cluster/routing/migration.py).
"""

from collections.abc import Sequence as SequenceOf

from ..kv.layout import blocks_for
from ..kv.segment import Segment
from .sequence import Sequence, SequenceStatus

# That a running sequence may fill between its offer and its seal, however short it is: asking and answering takes time.
SLACK_BLOCKS = 8
# Of what there is at the offer: so much more while that is read. A link moves KV at least 16 times as fast as decoding
# makes it.
SLACK_SHARE = 1 / 16
# Unread ones with which a sequence stops: they are read beside the last one, which changes until then.
NEAR_BLOCKS = 2


def slack_tokens(num_tokens: int, block_size: int) -> int:
    """Number of tokens that a sequence, offered with `num_tokens`, may generate before it waits for its sink."""
    return (SLACK_BLOCKS + int(blocks_for(num_tokens, block_size) * SLACK_SHARE)) * block_size


def offered_tokens(num_tokens: int, num_remaining: int, block_size: int) -> int:
    """Number of tokens for which the sink reserves blocks."""
    return num_tokens + min(slack_tokens(num_tokens, block_size), num_remaining)


def why_not_offered(sequence: Sequence) -> str | None:
    """Return why the running sequence cannot be handed off; None: it can be."""
    if sequence.handoff_id is not None:
        return "the sequence is being handed off already"
    if sequence.status is not SequenceStatus.RUNNING or not sequence.is_decoding or sequence.provisional is not None:
        return "the sequence is not decoding: it can be handed off once it has its first token here"
    return None


def headroom_blocks(num_running: int, num_blocks: int) -> int:
    """Number of free blocks that a worker keeps for its running sequences when it reserves some for arriving KV."""
    return min(num_running, num_blocks // 8)


class SinkLag:
    """Distance of a sink behind its source, as the sink reports it."""

    def __init__(self) -> None:
        self._num_unread: int | None = None  # blocks, at its last report

    def must_stop(self, segments: SequenceOf[Segment], num_read: int) -> bool:
        """Return whether the source stops now. `num_read`: of the segments that are announced, the first that the sink
        has read."""
        if not segments:
            return True  # only the last block is left, which is announced then
        if not 0 < num_read <= len(segments):
            return False
        before = self._num_unread
        self._num_unread = len({position for segment in segments[num_read:] for position in segment.positions})
        return self._num_unread <= NEAR_BLOCKS or (before is not None and self._num_unread >= before)
