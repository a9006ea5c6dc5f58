"""Workers that share experts meet, ring, and miss one that has gone: each a thread of this process."""

import socket
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from diptych.workers.common.errors import ConfigError, PeerLost, RankLost
from diptych.workers.parallel import rendezvous as doors_module
from diptych.workers.parallel.rendezvous import Doors, Seat, meet
from diptych.workers.ranks.lockstep import join

END_S = 20.0  # for what must happen; no test passes by waiting


@contextmanager
def group(size: int, meeting: Path) -> Generator[list[Doors]]:
    """All of them, in order."""
    with ThreadPoolExecutor(size) as pool, ExitStack() as stack:
        calls = [pool.submit(meet, Seat(rank, size, meeting), "terms") for rank in range(size)]
        found = [call.result() for call in calls]
        for each in found:
            stack.callback(each.close)
        yield found


def wait_for(doors: Doors, heard: dict[int, int]) -> None:
    while doors.heard != heard:
        doors.wait(END_S)


def test_each_hears_what_the_others_ring(tmp_path: Path) -> None:
    with group(3, tmp_path / "meeting") as [first, second, third]:
        assert not list((tmp_path / "meeting").iterdir())
        second.ring(0)
        second.ring(7)
        third.ring(1 << 40)
        wait_for(first, {1: 7, 2: 1 << 40})
        wait_for(third, {0: -1, 1: 7})
        wait_for(second, {0: -1, 2: 1 << 40})


def test_it_can_be_woken(tmp_path: Path) -> None:
    with group(2, tmp_path / "meeting") as [first, _]:
        for _ in range(3000):  # more than a socket holds
            first.wake()
        first.wait()
        assert first.heard == {1: -1}


def test_those_that_go_are_missed_by_name(tmp_path: Path) -> None:
    with group(3, tmp_path / "meeting") as [first, second, third]:
        second.close()
        second.close()
        with pytest.raises(PeerLost, match="worker 1 of the 3 that share experts ended"):
            first.wait()
        third.close()
        with pytest.raises(PeerLost, match="workers 1, 2 of the 3"):
            first.wait()
        with pytest.raises(PeerLost, match="worker 1 of"):
            first.ring(1)


def test_a_place_can_be_met_at_again_though_one_died_there(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    meeting.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(meeting / "worker-0"))
    for _ in range(2):
        with group(2, meeting):
            assert not list(meeting.iterdir())


def test_one_that_does_not_come_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors_module, "MEET_S", 0.0)
    with pytest.raises(RankLost, match=r"of the 3 workers .* 0, 2 did not come to .*meeting within 0 s"):
        meet(Seat(1, 3, tmp_path / "meeting"), "terms")
    assert not (tmp_path / "meeting").exists()


@pytest.mark.parametrize(("sizes", "terms"), [((2, 2), ("float32", "bfloat16")), ((2, 3), ("terms", "terms"))])
def test_all_must_agree(sizes: tuple[int, int], terms: tuple[str, str], tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        seats = [Seat(rank, size, tmp_path / "meeting") for rank, size in enumerate(sizes)]
        calls = [pool.submit(meet, *each) for each in zip(seats, terms, strict=True)]
        for ours, theirs in ((0, 1), (1, 0)):
            message = rf"worker {theirs} has other .*\({terms[theirs]}, {sizes[theirs]} .*\) than .*\({terms[ours]}, "
            with pytest.raises(ConfigError, match=message):
                calls[ours].result()


def test_nobody_sits_on_anothers_seat(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, Seat(0, 2, meeting), "terms")
        while not (meeting / "worker-0").exists():
            assert not first.done()
        with pytest.raises(ConfigError, match="same data_rank"):
            meet(Seat(0, 2, meeting), "terms")
        meet(Seat(1, 2, meeting), "terms").close()
        first.result().close()


def test_a_meeting_is_private(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    meeting.chmod(0o755)
    with pytest.raises(ConfigError, match="open to other users"):
        meet(Seat(0, 2, meeting), "terms")


@pytest.mark.parametrize("path", ["x" * 300, "no/such", "file"])
def test_a_place_that_cannot_be_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    with pytest.raises(ConfigError, match="cannot meet at"):
        meet(Seat(0, 2, tmp_path / path), "terms")


def test_a_meeting_may_have_a_long_name_and_ends_with_those_who_met(tmp_path: Path) -> None:
    meeting = tmp_path / ("x" * 200)
    with group(2, meeting) as found, ThreadPoolExecutor(2) as pool:
        for joined in list(pool.map(join, found)):
            joined.close()
    assert not meeting.exists()
