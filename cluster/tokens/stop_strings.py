"""Matches stop strings in streamed text. Pure: text in, text that may be sent out.

    StopTable     the strings and their automata: made once for a call, used by all its completions
    StopStrings   matching state of one completion's text

The result does not depend on how the text is split: the match that ends first counts, among those that end together the
longest, and no part of it is sent. Each stop string has a Knuth-Morris-Pratt automaton, so that the cost of a character
does not depend on the strings' lengths.
"""

from collections.abc import Sequence


class StopTable:
    """Stop strings and their automata. Time and memory are linear in the strings' characters."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self.stops = sorted(set(stops), key=len, reverse=True)
        self.failures = [_failures(stop) for stop in self.stops]


class StopStrings:
    def __init__(self, table: StopTable) -> None:
        self._stops = table.stops
        self._failures = table.failures
        self._matched = [0] * len(self._stops)  # characters of each string that the end of the text matches
        self._held = ""  # end of the text that may be the start of a match

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text. Returns the text that may now be sent, and the stop string that ended it."""
        if not self._stops:
            return text, None
        known = len(self._held)
        self._held += text
        for end in range(known, len(self._held)):
            if (found := self._step(self._held[end])) is not None:
                return self._held[: end + 1 - len(found)], found
        return self._release(max(self._matched)), None

    def flush(self) -> str:
        """Text that was held back; called at the end."""
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
    """Length of the longest proper suffix that is also a prefix, for each prefix of `stop`."""
    table = [0] * len(stop)
    k = 0
    for i in range(1, len(stop)):
        while k and stop[i] != stop[k]:
            k = table[k - 1]
        k += stop[i] == stop[k]
        table[i] = k
    return table
