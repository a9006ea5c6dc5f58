"""What a router's dashboard remembers: events of workers, those that were lost, requests that ended while seen."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from diptych.cluster.front.dashboard.activity import LOST_S, MAX_EVENTS, MAX_LOST, WATCH_S, Activity
from diptych.cluster.routing.fleet import WorkerInfo

FIRST = WorkerInfo("a", "10.0.0.1:5", "decode", "decode", "decode-1")
SECOND = WorkerInfo("b", "10.0.0.2:5", "decode", "decode", "decode-2")
OTHER = WorkerInfo("c", "10.0.0.2:6", "prefill", "prefill", "prefill-3")


class Clocked(Activity):
    """Activity at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(lambda: self.now, lambda: (FIRST, SECOND, OTHER))

    @property
    def kinds(self) -> list[tuple[str, str]]:
        return [(event.kind, event.subject) for event in self.events()]

    @property
    def names_lost(self) -> list[str]:
        return [lost.info.name for lost in self.lost(self.now)]


def test_a_worker_that_breaks_and_leaves_the_list_is_lost_until_another_of_its_pool_is_up() -> None:
    activity = Clocked()
    activity.on_up(FIRST)
    activity.on_down(FIRST, "connection reset")
    assert activity.names_lost == []  # it is listed still
    activity.on_gone(FIRST)
    assert [(lost.info.name, lost.reason) for lost in activity.lost(activity.now)] == [("decode-1", "connection reset")]
    activity.on_up(OTHER)
    assert activity.names_lost == ["decode-1"]
    activity.on_up(SECOND)
    assert activity.names_lost == []
    assert activity.kinds == [
        ("up", "decode-2"),
        ("up", "prefill-3"),
        ("gone", "decode-1"),
        ("down", "decode-1"),
        ("up", "decode-1"),
    ]


def test_a_link_that_comes_back_replaces_no_lost_worker() -> None:
    activity = Clocked()
    activity.on_down(SECOND, "gone")
    activity.on_gone(SECOND)
    activity.on_down(FIRST, "a cut")
    activity.on_up(FIRST)
    assert activity.names_lost == ["decode-2"]
    assert activity.events()[0].detail == "its link is back"


def test_a_worker_that_drained_is_not_lost() -> None:
    activity = Clocked()
    activity.on_draining(FIRST)
    activity.on_down(FIRST, "it ended")
    activity.on_gone(FIRST)
    activity.on_gone(SECOND)  # without a word: the supervisor has ended it
    assert activity.names_lost == ["decode-2"]


def test_a_lost_worker_is_forgotten_in_time() -> None:
    activity = Clocked()
    activity.on_gone(FIRST)
    activity.now += LOST_S
    assert activity.names_lost == []


def test_each_failed_try_to_reach_a_worker_is_no_event_of_its_own() -> None:
    activity = Clocked()
    for _ in range(5):
        activity.on_down(FIRST, "connection refused")
    assert activity.kinds == [("down", "decode-1")]


def test_like_events_are_counted_and_all_are_bounded() -> None:
    activity = Clocked()
    for _ in range(3):
        activity.now += 1
        activity.on_move("drain", "a", "b")
    [event] = activity.events()
    assert (event.kind, event.subject, event.detail, event.num, event.at) == (
        "moved",
        "decode-1",
        "to decode-2: drain",
        3,
        103.0,
    )
    for number in range(2 * MAX_EVENTS):
        activity.on_gone(replace(FIRST, incarnation=str(number), name=f"decode-{number}"))
    assert len(activity.events()) == MAX_EVENTS and len(activity.lost(activity.now)) == MAX_LOST


def test_requests_that_end_are_kept_while_somebody_looks() -> None:
    activity, driver = Clocked(), cast(Any, SimpleNamespace())
    activity.on_ended(driver, "stop", activity.now)
    assert activity.ended() == []
    activity.watch(activity.now)
    activity.on_ended(driver, "stop", activity.now + 1)
    activity.on_ended(driver, "length", activity.now + 2)
    assert [ended.outcome for ended in activity.ended()] == ["length", "stop"]
    activity.on_ended(driver, "stop", activity.now + WATCH_S)
    assert len(activity.ended()) == 2
    activity.watch(activity.now + 2 * WATCH_S)  # another look, later
    assert activity.ended() == []
