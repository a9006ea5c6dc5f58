"""Decides when the garbage collector runs, and what it looks at.

A full collection in a loaded worker looks at 190,000 objects: every thread stops for a tenth of a second or more.
"""

import atexit
import gc
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

MIN_NEW_OBJECTS = 20_000  # a collection of so many takes half a millisecond or less


@contextmanager
def loading() -> Generator[None]:
    """Collect nothing meanwhile, and exclude from later collections what lives at the end: it is never freed."""
    with collector_paused():
        try:
            yield
        finally:
            gc.collect()  # objects that are garbage now would be frozen too
            gc.freeze()
            atexit.register(gc.unfreeze)  # extension modules report remaining objects at exit as a leak


@contextmanager
def importing() -> Generator[None]:
    """Collect nothing meanwhile, and exclude from later collections what lives at the end, a little garbage too: a
    collection of what torch's modules are takes longer than it gains."""
    with collector_paused():
        try:
            yield
        finally:
            gc.freeze()
            atexit.register(gc.unfreeze)  # as `loading` does


def leave(status: int) -> NoReturn:
    """End a process whose work is done: run what is to run at its exit, but free no object, which takes torch's modules
    more than half a second."""
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def collect_rarely() -> None:
    """Look for garbage less often: after MIN_NEW_OBJECTS, where Python would after 700. For a process whose objects are
    many, live briefly, and are freed without the collector."""
    gc.set_threshold(MIN_NEW_OBJECTS, *gc.get_threshold()[1:])


@contextmanager
def collector_paused() -> Generator[None]:
    """Start no collection meanwhile.

    `ast.parse` of Python before 3.13 raises SystemError where a collection inside it calls it again, as a finaliser
    does that logs a traceback (https://github.com/python/cpython/issues/106905).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
