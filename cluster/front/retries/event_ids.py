"""Numbers of the server-sent events of an answer, by which a client goes on after the last that it has."""

END = "\n\n"  # of an event; JSON has no line breaks of its own


class Unnumbered(str):
    """Events of an answer that failed or was ended early: they have no ids, because a client that asks again gets other
    events in their place."""

    __slots__ = ()


class EventIds:
    """Ids of events: 1, 2, ... Those that the client has seen are left out."""

    def __init__(self, num_seen: int) -> None:
        self._num_seen = num_seen
        self._num = 0

    def add_to(self, events: str) -> str:
        """Events with their ids, less those that were seen."""
        if isinstance(events, Unnumbered):
            return events
        found: list[str] = []
        for event in events.split(END)[:-1]:
            self._num += 1
            if self._num > self._num_seen:
                found.append(f"id: {self._num}\n{event}{END}")
        return "".join(found)
