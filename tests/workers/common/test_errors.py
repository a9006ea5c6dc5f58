"""The tree of errors that errors.py shows is the one that it has."""

import re

from diptych.workers.common import errors
from diptych.workers.common.errors import DiptychError

LINE = re.compile(r"^    ([│ ]*)(?:[├└]── )?(\w+) +(\d{3}|\(start\)|\(bench\)|code) ")


def _shown() -> dict[str, tuple[str, str]]:
    """By name: its parent and its status, as the docstring draws them."""
    found: dict[str, tuple[str, str]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := LINE.match(f"{line} "):
            depth = 0 if match[2] == DiptychError.__name__ else 1 + len(match[1]) // 4
            path[depth:] = [match[2]]
            found[match[2]] = (path[depth - 1] if depth else "Exception", match[3])
    return found


def _real(cls: type[DiptychError]) -> dict[str, tuple[str, str]]:
    base = cls.__bases__[0]
    found = {cls.__name__: (base.__name__, str(cls.status))}
    for sub in cls.__subclasses__():
        if sub.__module__ == errors.__name__:
            found |= _real(sub)
    return found


def test_the_tree_that_is_shown_is_the_tree_that_is() -> None:
    shown, real = _shown(), _real(DiptychError)
    assert {name: parent for name, (parent, _) in shown.items()} == {name: parent for name, (parent, _) in real.items()}
    differ = {name for name, (_, status) in shown.items() if status.isdigit() and status != real[name][1]}
    assert not differ
