"""What a process loads before it serves stays for good: Python should not look for garbage in it, then or ever.

A full collection in a loaded worker looks at 190,000 objects: every thread stops for a tenth of a second or more.
"""

import atexit
import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def loading() -> Generator[None]:
    """Nothing is collected meanwhile, and nothing that lives at the end is looked at again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()  # what is garbage now would stay too
        gc.freeze()
        atexit.register(gc.unfreeze)  # extension modules call what is left at the very end a leak
        if was_enabled:
            gc.enable()
