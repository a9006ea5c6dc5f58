"""Error that ends a run of the simulation where something is wrong."""


class Violation(Exception):
    """Error: an invariant is broken. A planted bug counts as found only by these errors."""


class Hang(Violation):
    """The run, or a request in it, does not end."""


class Crash(Exception):
    """The code under test raised what nobody handles. Wrong too, and no invariant's merit: a planted bug whose
    signature is out of date does so."""


def demand(holds: object, what: str) -> None:
    if not holds:
        raise Violation(what)
