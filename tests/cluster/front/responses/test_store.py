"""What a router keeps of responses: bounded in bytes, entries and time, and found only by its own key."""

import random
from collections.abc import Callable

import pytest

from diptych.cluster.front.responses.store import (
    OVERHEAD_BYTES,
    ResponseStore,
    Stored,
    StoredTurn,
    StoreLimits,
    history,
)
from diptych.workers.common.errors import InvalidRequest, Overloaded, UnknownPreviousResponse, UnknownResponse

ANN, BOB = "Ann", "Bob"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def begin(
    store: ResponseStore, name: str, before: StoredTurn | None = None, text: str = "", tenant: str = ANN
) -> Stored:
    entry = Stored(name, tenant, [("item", text)], store.turn_after(before, text), lambda: "running", lambda: None)
    store.begin(entry)
    return entry


def keep(
    store: ResponseStore, name: str, before: StoredTurn | None = None, text: str = "", tenant: str = ANN
) -> StoredTurn:
    entry = begin(store, name, before, text, tenant)
    store.end(entry, f"whole {name}", f"answer {name}")
    return entry.turn


def names(store: ResponseStore, of: range, tenant: str = ANN) -> list[int]:
    """Those that are found, which does not make them younger."""

    def is_found(i: int) -> bool:
        try:
            store.find(tenant, str(i))
        except UnknownResponse:
            return False
        return True

    return [i for i in of if is_found(i)]


def test_a_response_is_found_until_it_is_dropped() -> None:
    store = ResponseStore()
    entry = begin(store, "a")
    assert store.find(ANN, "a") is entry and entry.is_running and entry.response() == "running"
    store.end(entry, "whole", "")
    assert store.find(ANN, "a").response() == "whole" and not entry.is_running
    store.drop(entry)
    store.drop(entry)
    with pytest.raises(UnknownResponse, match="not found"):
        store.find(ANN, "a")
    assert (len(store), store.num_bytes) == (0, 0)


def test_only_its_own_tenant_finds_it() -> None:
    store = ResponseStore()
    keep(store, "a", tenant=BOB)
    with pytest.raises(UnknownResponse):
        store.find(ANN, "a")
    with pytest.raises(UnknownPreviousResponse):
        store.previous(ANN, "a")
    assert history(store.previous(BOB, "a")) == ["answer a"]


def test_what_runs_cannot_be_followed() -> None:
    store = ResponseStore()
    begin(store, "a")
    with pytest.raises(InvalidRequest, match="in progress"):
        store.previous(ANN, "a")


def test_one_that_was_deleted_while_it_ran_does_not_come_back() -> None:
    store = ResponseStore()
    entry = begin(store, "a")
    store.drop(entry)
    store.end(entry, "whole", "answer")
    assert (len(store), store.num_bytes) == (0, 0)


def test_the_least_recently_used_go_first() -> None:
    store = ResponseStore(StoreLimits(max_entries=3))
    for i in range(3):
        keep(store, str(i))
    store.find(ANN, "0")
    keep(store, "3")
    assert names(store, range(4)) == [0, 2, 3]


def test_bytes_are_bounded() -> None:
    size = 10 * OVERHEAD_BYTES
    store = ResponseStore(StoreLimits(max_bytes=100 * OVERHEAD_BYTES))
    for i in range(20):
        keep(store, str(i), text="x" * size)
        assert store.num_bytes <= 100 * OVERHEAD_BYTES
    assert names(store, range(20)) == [16, 17, 18, 19], "two copies of the text: as items, and as messages"


def test_old_ones_go_and_use_keeps_them() -> None:
    clock = Clock()
    store = ResponseStore(StoreLimits(lifetime_s=10), clock)
    keep(store, "0")
    keep(store, "1")
    clock.now_s = 6
    store.find(ANN, "0")
    clock.now_s = 12
    assert names(store, range(2)) == [0]
    clock.now_s = 22
    assert names(store, range(2)) == [] and store.num_bytes == 0


def test_those_that_run_are_not_removed_but_bounded() -> None:
    clock = Clock()
    store = ResponseStore(StoreLimits(max_entries=2, lifetime_s=10), clock)
    begin(store, "0")
    keep(store, "1")
    begin(store, "2")
    clock.now_s = 100
    assert names(store, range(3)) == [0, 2]
    num_bytes = store.num_bytes
    with pytest.raises(Overloaded, match="store=false"):
        begin(store, "3")
    assert names(store, range(4)) == [0, 2] and store.num_bytes == num_bytes


def test_a_turn_lives_as_long_as_others_follow_it() -> None:
    store = ResponseStore(StoreLimits(max_entries=2))
    first = keep(store, "0", text="a")
    second = keep(store, "1", first, "b")
    keep(store, "2", second, "c")
    assert names(store, range(3)) == [1, 2]
    assert history(store.previous(ANN, "2")) == ["a", "answer 0", "b", "answer 1", "c", "answer 2"]


def test_long_conversations_are_refused() -> None:
    store = ResponseStore(StoreLimits(max_conversation_bytes=100))
    turn = keep(store, "0", text="a" * 60)
    with pytest.raises(InvalidRequest) as caught:
        store.turn_after(turn, "a" * 60)
    assert caught.value.param == "previous_response_id"
    with pytest.raises(InvalidRequest) as caught:
        store.turn_after(None, "a" * 101)
    assert caught.value.param == "input"


def test_a_very_long_chain_is_released() -> None:
    store, turn = ResponseStore(StoreLimits(max_entries=1)), None
    for i in range(5000):
        turn = keep(store, str(i), turn)
    entry = store.find(ANN, "4999")
    assert len(history(entry.turn)) == 5000
    store.drop(entry)
    assert store.num_bytes == 0
    begin(store, "again", entry.turn)  # it was looked up before it was removed
    assert store.num_bytes > 5000 * OVERHEAD_BYTES


@pytest.mark.parametrize("seed", range(20))
def test_bytes_are_counted_exactly(seed: int) -> None:
    """Whatever the order: what is counted is what the entries and their turns hold."""
    chance, clock = random.Random(seed), Clock()
    limits = StoreLimits(max_bytes=60 * OVERHEAD_BYTES, max_entries=12, lifetime_s=20)
    store, running, known = ResponseStore(limits, clock), list[Stored](), list[Stored]()

    def one_begins() -> None:
        ended = [entry for entry in known if not entry.is_running]
        before = chance.choice(ended).turn if ended and chance.random() < 0.7 else None
        try:
            entry = begin(store, str(len(known)), before, "x" * chance.randrange(3000))
        except Overloaded:
            return
        known.append(entry)
        running.append(entry)

    def one_ends() -> None:
        if running:
            store.end(running.pop(chance.randrange(len(running))), "y" * chance.randrange(3000), "z" * 100)

    def one_is_dropped() -> None:
        if known:
            store.drop(chance.choice(known))

    steps: list[Callable[[], None]] = [one_begins, one_begins, one_ends, one_ends, one_is_dropped]
    for _ in range(300):
        clock.now_s += chance.random()
        chance.choice(steps)()
        kept = [known[i] for i in range(len(known)) if _is_kept(store, known[i])]
        turns: dict[int, StoredTurn] = {}
        for entry in kept:
            turn: StoredTurn | None = entry.turn
            while turn is not None:
                turns[id(turn)] = turn
                turn = turn.before
        expected = sum(entry.num_bytes for entry in kept)
        expected += sum(OVERHEAD_BYTES + len(turn.messages) for turn in turns.values())
        assert store.num_bytes == expected <= limits.max_bytes and len(kept) == len(store) <= limits.max_entries


def _is_kept(store: ResponseStore, entry: Stored) -> bool:
    return entry.response_id in store


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_whole_response_is_replaced_by_a_whole_one_only(is_whole: bool) -> None:
    store = ResponseStore()
    keep(store, "a", text="first")
    before = store.num_bytes
    entry = begin(store, "a", text="second")
    assert store.find(ANN, "a") is entry and len(store) == 1
    third = begin(store, "a", text="third")  # the second was taken over
    store.end(entry, "cut", "", is_whole=False)
    assert store.find(ANN, "a") is third
    store.end(third, "whole again", "answer a", is_whole=is_whole)
    assert store.find(ANN, "a").response() == ("whole again" if is_whole else "whole a")
    assert is_whole or store.num_bytes == before
    store.drop(store.find(ANN, "a"))
    assert len(store) == 0 and store.num_bytes == 0


def test_a_deleted_response_takes_what_it_replaced_with_it() -> None:
    store = ResponseStore()
    keep(store, "a", text="first")
    entry = begin(store, "a", text="second")
    store.drop(entry)
    store.end(entry, "cut", "", is_whole=False)
    assert len(store) == 0 and store.num_bytes == 0


def test_what_is_not_whole_is_replaced_by_what_comes_later() -> None:
    store = ResponseStore()
    for response in ("cut", "cut later"):
        store.end(begin(store, "a"), response, "", is_whole=False)
        assert store.find(ANN, "a").response() == response
    store.drop(store.find(ANN, "a"))
    assert store.num_bytes == 0


def test_a_response_for_which_there_is_no_room_does_not_replace_another() -> None:
    store = ResponseStore(StoreLimits(max_bytes=8 * OVERHEAD_BYTES))
    keep(store, "a", text="first")
    with pytest.raises(Overloaded):
        begin(store, "a", text="x" * 8 * OVERHEAD_BYTES)
    assert store.find(ANN, "a").response() == "whole a"
