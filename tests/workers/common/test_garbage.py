import ast
import gc
import subprocess
import sys
import weakref

import pytest

from diptych.workers.common.garbage import MIN_NEW_OBJECTS, collect_rarely, collector_paused, importing, loading

from ...support.source import collections_that_parse

CALL = "f(a=[1, 2, 3], b={'x': [1, 2, {'y': 3}]})"


class Node:
    """In a cycle with itself, which only the collector ends."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize("is_enabled", [True, False])
def test_what_is_loaded_is_not_looked_at_again(is_enabled: bool) -> None:
    if not is_enabled:
        gc.disable()
    try:
        with loading():
            assert not gc.isenabled()
            garbage, kept = weakref.ref(Node()), Node()
            loaded = weakref.ref(kept)
            assert garbage() is not None
        assert gc.isenabled() is is_enabled
        assert garbage() is None
        del kept
        later = weakref.ref(Node())
        gc.collect()
        assert loaded() is not None and later() is None
    finally:
        gc.unfreeze()
        gc.enable()
    gc.collect()
    assert loaded() is None
    gc.freeze()  # again, as all tests begin


def test_what_is_imported_is_not_looked_at() -> None:
    try:
        with importing():
            assert not gc.isenabled()
            made = weakref.ref(Node())
        assert gc.isenabled()
        gc.collect()
        assert made() is not None
    finally:
        gc.unfreeze()
    gc.collect()
    assert made() is None
    gc.freeze()  # again, as all tests begin


def test_what_is_to_run_at_exit_runs_and_nothing_is_freed() -> None:
    code = (
        "import atexit\n"
        "from diptych.workers.common.garbage import leave\n"
        "class Kept:\n"
        "    def __del__(self): print('freed')\n"
        "kept = Kept()\n"
        "atexit.register(print, 'first')\n"
        "atexit.register(print, 'last')\n"
        "print('works', end=' ')\n"
        "leave(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "works last\nfirst\n", "")


def test_python_is_parsed_although_a_finaliser_parses_too() -> None:
    with collections_that_parse(), collector_paused():
        ast.parse(CALL)
        assert not gc.isenabled()
    assert gc.isenabled()
    with collector_paused(), collector_paused():
        pass
    assert gc.isenabled()


def test_garbage_is_looked_for_after_many_new_objects() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 11, 12)  # another test of this process may have asked for it already
        collect_rarely()
        assert gc.get_threshold() == (MIN_NEW_OBJECTS, 11, 12)
    finally:
        gc.set_threshold(*before)
