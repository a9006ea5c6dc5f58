"""Settings of all tests: a coroutine runs in a separate event loop (pytest-asyncio), with a time limit; an HTTP client
waits as long, where a test sets nothing else: a machine with other work may not answer within httpx's 5 s. Random
numbers of torch are the same each time, whichever tests ran before in the process.

The garbage collector does not look at what the test modules have imported: a million objects, a second for each test
that asks for a collection. Nor does one at the end: a process of pytest-xdist, whose status nobody reads, ends without
freeing them. OpenMP's threads sleep while they wait: several processes share the cores, and a thread
that spins keeps one from the thread that it waits for.
"""

import asyncio
import atexit
import functools
import gc
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import hypothesis
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from diptych.workers.common.garbage import leave

LIMIT_S = 120.0
E2E_LIMIT_S = 600.0

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported

for phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, phase, LIMIT_S)


# Its examples are the same each time, and none is slow: a machine with other work may be.
slowness = (hypothesis.HealthCheck.too_slow,)
hypothesis.settings.register_profile("gate", derandomize=True, deadline=None, suppress_health_check=slowness)
hypothesis.settings.load_profile("gate")


def limited(test: Callable[..., Awaitable[None]], limit_s: float) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(limit_s):
            await test(*args, **kwargs)

    return run


gc.disable()  # until the test modules are imported


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # of pytest-xdist
        atexit.register(end_at_once, os.getpid())  # last, so it runs first, and the others in it


def end_at_once(of: int) -> None:
    atexit.unregister(end_at_once)
    if os.getpid() == of:  # not a process that was forked from it
        leave(0)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()  # objects that are garbage now would be frozen too
    gc.freeze()
    atexit.register(gc.unfreeze)  # extension modules report remaining objects at exit as a leak


@pytest.fixture(scope="module", autouse=True)
def threads_of_torch() -> Iterator[None]:
    """As many again for the next module: a model runner sets its own."""
    torch = sys.modules.get("torch")
    num = torch.get_num_threads() if torch else 0
    yield
    if torch:
        torch.set_num_threads(num)


def pytest_runtest_setup() -> None:
    if (torch := sys.modules.get("torch")) is not None:  # not imported for tests that need none
        torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = limited(item.obj, E2E_LIMIT_S if item.get_closest_marker("e2e") else LIMIT_S)
