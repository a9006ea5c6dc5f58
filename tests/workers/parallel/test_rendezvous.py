"""Workers that share experts connect, send, and notice a peer that has ended: each a thread of this process."""

import socket
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from diptych.workers.common.errors import ConfigError, PeerLost, RankLost
from diptych.workers.parallel import rendezvous as rendezvous_module
from diptych.workers.parallel.groups import GlooGroup
from diptych.workers.parallel.rendezvous import PeerGroup, PeerSockets, connect_peers
from diptych.workers.ranks.data_parallel import join

END_S = 20.0  # for what must happen; no test passes by waiting


@contextmanager
def group(size: int, rendezvous: Path) -> Generator[list[PeerSockets]]:
    """All of them, in order."""
    with ThreadPoolExecutor(size) as pool, ExitStack() as stack:
        calls = [pool.submit(connect_peers, PeerGroup(rank, size, rendezvous), "terms") for rank in range(size)]
        found = [call.result() for call in calls]
        for each in found:
            stack.callback(each.close)
        yield found


def wait_for(peer_sockets: PeerSockets, expected: dict[int, int]) -> None:
    while peer_sockets.received != expected:
        peer_sockets.wait(END_S)


def test_each_receives_what_the_others_send(tmp_path: Path) -> None:
    with group(3, tmp_path / "rendezvous") as [first, second, third]:
        assert not list((tmp_path / "rendezvous").iterdir())
        second.send(0)
        second.send(7)
        third.send(1 << 40)
        wait_for(first, {1: 7, 2: 1 << 40})
        wait_for(third, {0: -1, 1: 7})
        wait_for(second, {0: -1, 2: 1 << 40})


def test_details_are_those_of_their_number(tmp_path: Path) -> None:
    """A peer that is faster has sent the next number already."""
    with group(3, tmp_path / "rendezvous") as [first, second, third]:
        for number in range(4):
            second.send(number, 10 * number)
        third.send(2, 5)
        wait_for(first, {1: 3, 2: 2})
        assert first.details(2) == [20, 5]
        third.send(3, 7)
        wait_for(first, {1: 3, 2: 3})
        assert first.details(3) == [30, 7]


def test_it_can_be_woken(tmp_path: Path) -> None:
    with group(2, tmp_path / "rendezvous") as [first, _]:
        for _ in range(3000):  # more than a socket holds
            first.wake()
        first.wait()
        assert first.received == {1: -1}


def test_those_that_go_are_missed_by_name(tmp_path: Path) -> None:
    with group(3, tmp_path / "rendezvous") as [first, second, third]:
        second.close()
        second.close()
        with pytest.raises(PeerLost, match="worker 1 of the 3 that share experts ended"):
            first.wait()
        third.close()
        with pytest.raises(PeerLost, match="workers 1, 2 of the 3"):
            first.wait()
        with pytest.raises(PeerLost, match="worker 1 of"):
            first.send(1)


def test_a_place_can_be_met_at_again_though_one_died_there(tmp_path: Path) -> None:
    rendezvous = tmp_path / "rendezvous"
    rendezvous.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(rendezvous / "worker-0"))
    for _ in range(2):
        with group(2, rendezvous):
            assert not list(rendezvous.iterdir())


def test_one_that_does_not_come_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "RENDEZVOUS_S", 0.0)
    with pytest.raises(RankLost, match=r"of the 3 workers .* 0, 2 did not connect at .*rendezvous within 0 s"):
        connect_peers(PeerGroup(1, 3, tmp_path / "rendezvous"), "terms")
    assert not (tmp_path / "rendezvous").exists()


@pytest.mark.parametrize(("sizes", "terms"), [((2, 2), ("float32", "bfloat16")), ((2, 3), ("terms", "terms"))])
def test_all_must_agree(sizes: tuple[int, int], terms: tuple[str, str], tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        peer_groups = [PeerGroup(rank, size, tmp_path / "rendezvous") for rank, size in enumerate(sizes)]
        calls = [pool.submit(connect_peers, *each) for each in zip(peer_groups, terms, strict=True)]
        for ours, theirs in ((0, 1), (1, 0)):
            message = (
                rf"worker {theirs} shares other .*\({terms[theirs]}, {sizes[theirs]} .*\) than .*\({terms[ours]}, "
            )
            with pytest.raises(ConfigError, match=message):
                calls[ours].result()


def test_nobody_sits_on_anothers_seat(tmp_path: Path) -> None:
    rendezvous = tmp_path / "rendezvous"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(connect_peers, PeerGroup(0, 2, rendezvous), "terms")
        while not (rendezvous / "worker-0").exists():
            assert not first.done()
        with pytest.raises(ConfigError, match="same data_rank"):
            connect_peers(PeerGroup(0, 2, rendezvous), "terms")
        connect_peers(PeerGroup(1, 2, rendezvous), "terms").close()
        first.result().close()


def test_a_rendezvous_is_private(tmp_path: Path) -> None:
    rendezvous = tmp_path / "rendezvous"
    rendezvous.mkdir()
    rendezvous.chmod(0o755)
    with pytest.raises(ConfigError, match="accessible to others"):
        connect_peers(PeerGroup(0, 2, rendezvous), "terms")


@pytest.mark.parametrize("path", ["x" * 300, "no/such", "file"])
def test_a_place_that_cannot_be_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    with pytest.raises(ConfigError, match="cannot connect at"):
        connect_peers(PeerGroup(0, 2, tmp_path / path), "terms")


def test_a_rendezvous_may_have_a_long_name_and_ends_with_those_who_met(tmp_path: Path) -> None:
    rendezvous = tmp_path / ("x" * 200)
    with group(2, rendezvous) as found, ThreadPoolExecutor(2) as pool:
        for joined in list(pool.map(lambda of: join(of, GlooGroup.join), found)):
            joined.close()
    assert not rendezvous.exists()
