"""What is shown must not depend on how the text was cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.cluster.tokens.stop_strings import StopStrings, StopTable


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    machine = StopStrings(StopTable(stops))
    shown: list[str] = []
    for piece in pieces:
        text, found = machine.push(piece)
        shown.append(text)
        if found is not None:
            return shown, found
    return [*shown, machine.flush()], None


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """By trying every end: the first end at which any stop string is found, the longest of those that end there."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "found"),
    [
        ([], ["a", "b"], ["a", "b", ""], None),
        (["END"], ["a", "E", "N", "D", "z"], ["a", "", "", ""], "END"),
        (["END"], ["a", "EN", "x"], ["a", "", "ENx", ""], None),
        (["END"], ["a", "EEN", "D!"], ["a", "E", ""], "END"),
        (["END"], ["aEN"], ["a", "EN"], None),
        (["abcd", "c"], ["abcd"], ["ab"], "c"),
        (["bc", "abc"], ["abc"], [""], "abc"),
        (["aab"], ["aaab"], ["a"], "aab"),
        (["🙂"], ["x🙂y"], ["x"], "🙂"),
    ],
)
def test_examples(stops: list[str], pieces: list[str], shown: list[str], found: str | None) -> None:
    assert run(stops, pieces) == (shown, found)


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_any_cut_shows_the_same(stops: list[str], pieces: list[str]) -> None:
    shown, found = run(stops, pieces)
    assert ("".join(shown), found) == reference(stops, "".join(pieces))


@settings(max_examples=100, deadline=None)
@given(stop=st.text("ab", min_size=1, max_size=6), text=st.text("ab", max_size=20))
def test_holds_back_no_more_than_may_become_the_stop_string(stop: str, text: str) -> None:
    machine = StopStrings(StopTable([stop]))
    shown = ""
    for n, char in enumerate(text, start=1):
        piece, found = machine.push(char)
        if found:
            return
        shown += piece
        held = text[len(shown) : n]
        assert stop.startswith(held) and held != stop


def test_completions_of_one_call_share_a_table_and_nothing_else() -> None:
    table = StopTable(["END", "END"])
    first, second = StopStrings(table), StopStrings(table)
    assert table.stops == ["END"]
    assert first.push("aEN") == second.push("aEN") == ("a", None)
    assert first.push("D") == ("", "END")
    assert second.push("x") == ("ENx", None)
