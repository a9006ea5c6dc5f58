"""Stop strings over streamed text. Pure: text in, text that may be shown out.

    StopTable     the strings and their automata: made once for a call, read by all its completions
    StopStrings   where one completion's text stands in them

What is shown does not depend on how the text was cut: the match that ends first wins, of those that end together the
longest, and no part of it is shown. Each stop string is followed by a Knuth-Morris-Pratt automaton, so that a character
costs the same however long the strings are.
"""

from collections.abc import Sequence


class StopTable:
    """Takes time and memory linear in the strings' characters."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self.stops = sorted(set(stops), key=len, reverse=True)
        self.failures = [_failures(stop) for stop in self.stops]


class StopStrings:
    def __init__(self, table: StopTable) -> None:
        self._stops = table.stops
        self._failures = table.failures
        self._matched = [0] * len(self._stops)  # characters of each that the text's end matches
        self._held = ""  # the text's end that may be the start of a match

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may now be shown, and the stop string that ended it."""
        if not self._stops:
            return text, None
        known = len(self._held)
        self._held += text
        for end in range(known, len(self._held)):
            if (found := self._step(self._held[end])) is not None:
                return self._held[: end + 1 - len(found)], found
        return self._release(max(self._matched)), None

    def flush(self) -> str:
        """The held text, once nothing follows it."""
        return self._release(0)

    def _release(self, num_held: int) -> str:
        cut = len(self._held) - num_held
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _step(self, char: str) -> str | None:
        for i, stop in enumerate(self._stops):
            k = self._matched[i]
            while k and stop[k] != char:
                k = self._failures[i][k - 1]
            k += stop[k] == char
            if k == len(stop):
                return stop
            self._matched[i] = k
        return None


def _failures(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper suffix that is also its prefix."""
    table = [0] * len(stop)
    k = 0
    for i in range(1, len(stop)):
        while k and stop[i] != stop[k]:
            k = table[k - 1]
        k += stop[i] == stop[k]
        table[i] = k
    return table
