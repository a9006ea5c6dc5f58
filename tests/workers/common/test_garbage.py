import gc
import weakref

import pytest

from diptych.workers.common.garbage import loading


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
