"""Messages to a router that could be too large as one."""

import pytest

from diptych.proto import worker_pb2
from diptych.workers.server import router_links
from diptych.workers.server.router_links import RouterLinks


@pytest.mark.parametrize("num", [0, 1, 4, 5, 12, 14])
async def test_a_snapshot_is_sent_in_pieces(monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    """The first piece replaces what the router knew; the others add to it."""
    monkeypatch.setattr(router_links, "SNAPSHOT_NAMES", 4)
    link, names = RouterLinks().open(), [bytes([number]) * 16 for number in range(num)]
    link.send_snapshot(names)
    link.outbox.end()
    message = await link.outbox.take()
    assert message is not None
    pieces = [each.blocks for each in message.batch.messages] or [message.blocks]
    assert [piece.cleared for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [name for piece in pieces for name in piece.stored] == names
    assert all(len(piece.stored) <= 4 for piece in pieces)


def test_a_piece_of_a_snapshot_is_far_below_the_limit_of_a_message() -> None:
    names = [bytes(16)] * router_links.SNAPSHOT_NAMES
    assert worker_pb2.BlockEvents(stored=names).ByteSize() < 2 << 20
