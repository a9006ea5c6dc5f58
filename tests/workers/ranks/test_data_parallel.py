"""Who computes which step, and what becomes of the others where one ends. A step is a barrier here."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from diptych.workers.common.errors import PeerLost, RankLost
from diptych.workers.core.sequence import SampledToken
from diptych.workers.parallel.rendezvous import PeerGroup, PeerSockets, connect_peers
from diptych.workers.ranks import data_parallel
from diptych.workers.ranks.data_parallel import READY, DataParallelLoop, is_due, meet

END_S = 20.0  # for what must happen; no test passes by waiting


@pytest.mark.parametrize(
    ("rung", "has_batch", "is_idle", "expected"),
    [
        ([0, 0], False, True, False),  # no worker has a batch
        ([0, 0], True, False, True),
        ([0, 3], False, True, True),  # one of the others has
        ([3, 3], False, False, False),  # this worker's engine will report its work in a moment
        ([3, 3], True, False, True),
        ([2, 2], False, True, False),  # of the step before
    ],
)
def test_who_enters_step_3(rung: list[int], has_batch: bool, is_idle: bool, expected: bool) -> None:
    assert is_due(3, rung, has_batch, is_idle) == expected


class Member:
    """A member of a group; `steps` has, for each step, whether the member had a batch for it."""

    def __init__(self, peer_sockets: PeerSockets, barrier: threading.Barrier, *, agrees: bool = False) -> None:
        self.steps: list[str] = []
        self.sizes: list[list[int]] = []  # that each step was agreed to have
        self.losses: queue.SimpleQueue[RankLost] = queue.SimpleQueue()
        self.peer_sockets, self.barrier = peer_sockets, barrier
        self.lane = DataParallelLoop(peer_sockets, self, self.losses.put, None, self.agree if agrees else None)

    def agree(self, sizes: Sequence[int]) -> bool:
        self.sizes.append(sorted(sizes))
        return False

    def serve(self) -> None:
        self.compute("served")

    def leave(self) -> None:
        """As connections end."""
        self.barrier.abort()

    def compute(self, what: str) -> list[SampledToken]:
        self.steps.append(what)
        try:
            self.barrier.wait(END_S)
        except threading.BrokenBarrierError as e:
            raise RankLost("somebody did not do its part") from e
        return []

    def run(self, size: int = 0) -> list[SampledToken]:
        return self.lane.submit(lambda: self.compute("batch"), size).result(END_S)


@pytest.fixture(params=[2, 3])
def members(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Member]]:
    yield from made(request.param, tmp_path)


@pytest.fixture(params=[2, 3])
def agreeing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Member]]:
    yield from made(request.param, tmp_path, agrees=True)


def made(size: int, tmp_path: Path, kind: type[Member] = Member, *, agrees: bool = False) -> Iterator[list[Member]]:
    barrier = threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        peer_groups = [PeerGroup(rank, size, tmp_path / "rendezvous") for rank in range(size)]
        found = [
            kind(peer_sockets, barrier, agrees=agrees)
            for peer_sockets in pool.map(lambda peer_group: connect_peers(peer_group, ""), peer_groups)
        ]
    yield found
    barrier.abort()
    for member in found:
        member.lane.close()
        member.lane.close()


def test_the_idle_serve_as_often_as_one_computes(members: list[Member]) -> None:
    first, *others = members
    for _ in range(5):
        assert first.run() == []
    first.lane.check()
    for i, member in enumerate(members):
        assert member.run() == []
        member.lane.check()
        for other in members:
            if other is not member:
                assert other.steps[5 : 5 + i].count("batch") == (other in members[:i])
    assert first.steps[:6] == ["batch"] * 6
    for other in others:
        assert other.steps[:6] == ["served"] * 6
        assert len(other.steps) == len(first.steps) == 5 + len(members)


def test_the_busy_share_their_steps(members: list[Member]) -> None:
    """Each is between two steps now and then; those who are ahead wait for it."""

    def work(member: Member) -> None:
        for _ in range(20):
            member.run()
        member.lane.check()

    with ThreadPoolExecutor(len(members)) as pool:
        list(pool.map(work, members))
    assert len({len(member.steps) for member in members}) == 1
    for member in members:
        first = member.steps.index("batch")
        assert member.steps[first : first + 20] == ["batch"] * 20


def test_what_was_given_up_is_not_computed(members: list[Member]) -> None:
    """And no step is begun for it: the others would wait in it."""
    first, other, *_ = members
    held, go_on = threading.Event(), threading.Event()

    def slow() -> list[SampledToken]:
        held.set()
        go_on.wait(END_S)
        return first.compute("batch")

    running = first.lane.submit(slow)
    held.wait(END_S)
    waiting = first.lane.submit(lambda: first.compute("never"))
    assert waiting.cancel()
    go_on.set()
    running.result(END_S)
    first.lane.check()
    other.run()
    other.lane.check()
    first.run()
    assert "never" not in first.steps and first.steps.count("batch") == 2


def test_a_step_that_fails_ends_all(members: list[Member]) -> None:
    first, *others = members

    go_on = threading.Event()

    def fail() -> list[SampledToken]:
        go_on.wait(END_S)
        raise ValueError("a bug")

    failing = first.lane.submit(fail)
    waiting = [other.lane.submit(lambda other=other: other.compute("batch")) for other in others]
    go_on.set()
    with pytest.raises(RankLost, match=r"worker 0 .* failed in a step \(a bug\)"):
        failing.result(END_S)
    assert type(failing.exception()) is RankLost
    assert "a bug" in first.losses.get(timeout=END_S).message
    for future, other in zip(waiting, others, strict=True):
        with pytest.raises(PeerLost, match="that share experts ended"):
            future.result(END_S)
        assert other.losses.get(timeout=END_S) is future.exception()
        with pytest.raises(PeerLost, match="that share experts ended"):
            other.lane.check()
        with pytest.raises(PeerLost, match="that share experts ended"):
            other.run()


def test_one_that_rings_for_a_step_beyond_the_next_is_not_followed(members: list[Member]) -> None:
    members[0].peer_sockets.send(9)
    found = [other.losses.get(timeout=END_S).message for other in members[1:]]
    assert any("announced step 9 before step 1" in message for message in found)


def test_one_that_closes_is_missed_at_once_by_the_idle(members: list[Member]) -> None:
    first, *others = members
    first.run()
    first.lane.close()
    for other in others:
        assert "that share experts ended" in other.losses.get(timeout=END_S).message
    assert first.losses.empty()
    with pytest.raises(RankLost, match="closing"):
        first.lane.check()


def test_all_know_the_sizes_of_all_before_each_step(agreeing: list[Member]) -> None:
    first, *others = agreeing
    for size in (4, 9):
        first.run(size)
    first.lane.check()
    for other in others:
        other.run(7)
        other.lane.check()
    zeros = [0] * len(others)
    assert first.sizes == [[*zeros, 4], [*zeros, 9], *[[*zeros, 7]] * len(others)]
    assert all(other.sizes == first.sizes for other in others)


def test_the_busy_agree_on_their_steps(agreeing: list[Member]) -> None:
    def work(member: Member) -> None:
        for size in range(20):
            member.run(size)
        member.lane.check()

    with ThreadPoolExecutor(len(agreeing)) as pool:
        list(pool.map(work, agreeing))
    assert all(member.sizes == agreeing[0].sizes for member in agreeing)
    assert [*range(20)] == sorted({max(sizes) for sizes in agreeing[0].sizes})


class Launching(Member):
    """A member whose device computes: a step is launched, and the next one may be agreed on at once."""

    def compute(self, what: str) -> list[SampledToken]:
        self.steps.append(what)
        return []


@pytest.fixture
def launching(tmp_path: Path) -> Iterator[list[Member]]:
    yield from made(3, tmp_path, Launching, agrees=True)


def test_members_that_launch_ahead_agree_on_their_steps(launching: list[Member]) -> None:
    """A fast one rings for the next step before a slow one knows the sizes of this one."""

    def work(member: Member) -> None:
        for size in range(300):
            member.run(3 * size + member.peer_sockets.group.rank)
        member.lane.check()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, launching))
    asked = {3 * size + rank for rank in range(3) for size in range(300)}
    until = time.monotonic() + END_S
    while len({len(member.sizes) for member in launching}) > 1 and time.monotonic() < until:
        time.sleep(0.01)  # the last step is served yet
    assert all(member.sizes == launching[0].sizes for member in launching)
    assert {of for sizes in launching[0].sizes for of in sizes} == asked


def test_one_that_ends_while_a_step_is_agreed_on_is_missed(agreeing: list[Member]) -> None:
    """It has a batch under way, and does not come to the next step."""
    first, second, *_ = agreeing
    go_on, begun = threading.Event(), threading.Event()

    def fail() -> list[SampledToken]:
        begun.set()
        go_on.wait(END_S)
        raise ValueError("a bug")

    failing = first.lane.submit(fail, 3)
    begun.wait(END_S)
    waiting = second.lane.submit(lambda: second.compute("batch"), 2)
    go_on.set()
    with pytest.raises(RankLost, match="a bug"):
        failing.result(END_S)
    with pytest.raises(PeerLost, match="that share experts ended"):
        waiting.result(END_S)


def test_one_that_closes_while_others_do_not_come_ends(agreeing: list[Member]) -> None:
    """The second is between two steps, and so does not enter this one."""
    first, second, *_ = agreeing
    second.run(1)
    waiting = first.lane.submit(lambda: first.compute("batch"), 2)
    first.lane.close()
    with pytest.raises(RankLost, match="the worker is closing"):
        waiting.result(END_S)
    assert first.losses.empty()


def test_one_that_does_not_come_is_not_waited_for_without_end(
    agreeing: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = agreeing
    second.run(1)  # and is between two steps
    monkeypatch.setattr(data_parallel, "STALL", timedelta(seconds=0.1))
    with pytest.raises(RankLost):
        first.run(2)
    said = [member.losses.get(timeout=END_S).message for member in agreeing if member is not second]
    assert any("of those that share experts [1] did not come to a step within 0.1 s" in each for each in said)


def test_one_that_holds_serves_nobody_until_it_is_idle(members: list[Member]) -> None:
    """And holds once the step is over that it serves in."""
    first, second, *_ = members
    second.lane.hold()
    waiting = first.lane.submit(lambda: first.compute("batch"))
    second.steps.append("held")
    second.lane.check()
    waiting.result(END_S)
    go_on, order = threading.Event(), list[str]()

    def slow() -> list[SampledToken]:
        go_on.wait(END_S)
        order.append("computed")
        return first.compute("batch")

    def hold() -> None:
        second.lane.hold()
        order.append("held")

    with ThreadPoolExecutor(1) as pool:
        waiting = first.lane.submit(slow)
        wait_until(lambda: second.steps.count("served") == 2)
        held = pool.submit(hold)
        wait_until(lambda: not second.lane._is_idle)
        go_on.set()
        waiting.result(END_S)
        held.result(END_S)
    assert order == ["computed", "held"]
    assert second.steps[:3] == ["held", "served", "served"]
    second.lane.check()


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + END_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_one_that_holds_hears_of_a_loss(members: list[Member]) -> None:
    first, second, *_ = members
    first.lane.close()
    second.losses.get(timeout=END_S)
    with pytest.raises(PeerLost, match="that share experts ended: all of them end with it"):
        second.lane.hold()


class Deferring(Member):
    """A member of a group in which a step of a large batch has no other one."""

    def agree(self, sizes: Sequence[int]) -> bool:
        super().agree(sizes)
        return max(sizes) > 100 > sizes[0] > 0


@pytest.fixture(params=[2, 3])
def deferring(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Member]]:
    yield from made(request.param, tmp_path, Deferring, agrees=True)


def test_a_batch_that_waits_is_in_the_next_step(deferring: list[Member]) -> None:
    first, second, *others = deferring
    second.lane.hold()
    large = first.lane.submit(lambda: first.compute("large"), 200)
    small = second.lane.submit(lambda: second.compute("small"), 5)
    large.result(END_S)
    first.lane.check()
    small.result(END_S)
    second.lane.check()
    assert [of.steps for of in (first, second)] == [["large", "served"], ["served", "small"]]
    assert [member.steps for member in others] == [["served"] * 2] * len(others)
    assert [max(sizes) for sizes in first.sizes] == [200, 5]


def test_all_meet_however_late_the_last_comes(tmp_path: Path) -> None:
    peer_groups = [PeerGroup(rank, 3, tmp_path / "rendezvous") for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(lambda peer_group: connect_peers(peer_group, ""), peer_groups)
        waiting = [pool.submit(meet, of, READY) for of in (first, second)]
        wait_until(lambda: third.received == {0: READY, 1: READY} or bool(third.wait(0.01)))
        assert not any(of.done() for of in waiting)
        meet(third, READY)
        for of in waiting:
            of.result(END_S)
        waiting = [pool.submit(meet, of, READY + 1) for of in (first, second)]
        third.close()
        for of in waiting:
            with pytest.raises(PeerLost, match="that share experts ended"):
                of.result(END_S)
    for each in (first, second):
        each.close()
