"""What a run of the simulation ends with where something is wrong."""


class Violation(Exception):
    """What must never happen did, and an invariant found it. A planted bug counts as found by these alone."""


class Hang(Violation):
    """The run, or a request in it, does not end."""


class Crash(Exception):
    """The code under test raised what nobody handles. Wrong too, and no invariant's merit: a planted bug whose
    signature is out of date does so."""


def demand(holds: object, what: str) -> None:
    if not holds:
        raise Violation(what)
