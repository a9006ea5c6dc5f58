"""Workers that share experts, while their devices wait for each other: one that ends releases the others."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from diptych.workers.common.errors import PeerLost, RankLost
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.models.layers.row_exchange import RowExchange
from diptych.workers.models.layers.turns import finished
from diptych.workers.parallel.rendezvous import PeerGroup, PeerSockets, connect_peers
from diptych.workers.ranks import device_peers
from diptych.workers.ranks.device_peers import DevicePeers

END_S = 20.0  # for what must happen; no test passes by waiting


@pytest.fixture
def both(tmp_path: Path) -> Iterator[list[tuple[PeerSockets, DevicePeers]]]:
    def make(rank: int) -> tuple[PeerSockets, DevicePeers]:
        sockets = connect_peers(PeerGroup(rank, 2, tmp_path / "rendezvous"), "")
        peers = DevicePeers(sockets, FakeDevice(), RowExchange(rank, 2))
        peers.join()
        return sockets, peers

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(make, range(2)))
    yield made
    for sockets, peers in reversed(made):  # the first one's group may still wait for the second
        peers.close()
        peers.close()
        sockets.close()


def test_rows_are_exchanged_once_all_have_joined(both: list[tuple[PeerSockets, DevicePeers]]) -> None:
    def sum_of(peers: DevicePeers) -> list[float]:
        given = torch.full((4, 1), float(peers.exchange.rank + 1))
        return finished(peers.exchange.scatter(given, 2)).view(-1).tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(sum_of, [peers for _, peers in both])) == [[3.0, 3.0]] * 2
    for _, peers in both:
        peers.check()


def test_one_whose_sockets_close_is_not_waited_for(both: list[tuple[PeerSockets, DevicePeers]]) -> None:
    """Its connections of the group are still open: the device would wait."""
    (_, first), (its_sockets, second) = both
    waiting = threading.Event()

    def wait_for_it() -> None:
        waiting.set()
        finished(first.exchange.scatter(torch.ones(4, 1), 2))

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(wait_for_it)
        waiting.wait(END_S)
        second.leave()
        its_sockets.close()
        with pytest.raises(PeerLost, match="lost another rank"):
            call.result(END_S)
    with pytest.raises(PeerLost, match="one of the 2 workers that share experts ended: all of them end with it"):
        first.check()


def test_one_that_does_not_come_is_not_waited_for_without_end(
    both: list[tuple[PeerSockets, DevicePeers]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither ends nor computes."""
    (_, first), _ = both
    monkeypatch.setattr(device_peers, "STALL", timedelta(seconds=0.1))
    with pytest.raises(PeerLost, match="lost another rank"), first.waiting():
        finished(first.exchange.scatter(torch.ones(4, 1), 2))
    with pytest.raises(RankLost, match=r"the 2 workers that share experts compute together has not ended within 0.1 s"):
        first.check()


def test_a_wait_is_bounded_whatever_another_thread_waits_for(
    both: list[tuple[PeerSockets, DevicePeers]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread copies blocks, say, while the loop's is in a step of the others."""
    (_, first), _ = both
    monkeypatch.setattr(device_peers, "STALL", timedelta(seconds=0.1))
    is_waiting = threading.Event()

    def wait_for_it() -> None:
        with first.waiting():
            is_waiting.set()
            finished(first.exchange.scatter(torch.ones(4, 1), 2))

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(wait_for_it)
        is_waiting.wait(END_S)
        with first.waiting():
            pass
        try:
            with pytest.raises(PeerLost, match="lost another rank"):
                call.result(END_S)
        finally:
            first.leave()


def test_who_leaves_waits_for_nobody(both: list[tuple[PeerSockets, DevicePeers]]) -> None:
    (_, first), _ = both
    first.leave()
    first.leave()
    with pytest.raises(PeerLost):
        finished(first.exchange.scatter(torch.ones(4, 1), 2))
    first.check()  # it was not the other that ended
