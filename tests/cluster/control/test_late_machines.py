"""Workers that wait for a machine before they start."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from diptych.cluster.common.handles import SettingsGeneration, WorkerStarted
from diptych.cluster.control import supervisor, worker_record, worker_watch

from ...support.supervised import SETTINGS, FakeLauncher, FakeProcess, is_ready, supervising

WAIT_S, NUM_LOOKS = 7200.0, 3  # for which a worker waits


class LateMachines(FakeLauncher):
    """Its clock jumps by WAIT_S when a worker is first asked what it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.came = asyncio.Event()
        self.num_asked = 0

    def monotonic(self) -> float:
        return time.monotonic() + (WAIT_S if self.num_asked else 0.0)

    async def worker(self, worker_id: str, pool: str, settings: SettingsGeneration = SETTINGS) -> FakeProcess:
        process = await super().worker(worker_id, pool, settings)
        start = process.start

        async def start_late() -> WorkerStarted:
            await self.came.wait()
            return await start()

        async def waiting_for() -> str:
            self.num_asked += 1
            if self.num_asked > NUM_LOOKS:
                self.came.set()
                return ""
            return "a node with GPU: 1"

        process.start, process.waiting_for = start_late, waiting_for
        return process


async def test_the_wait_for_a_machine_does_not_count_as_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = LateMachines()
    clock = SimpleNamespace(monotonic=launcher.monotonic, time=time.time, time_ns=time.time_ns)
    monkeypatch.setattr(worker_watch, "PLACED_S", 0.01)
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(worker_record, "time", clock)
    async with supervising(launcher, mixed={"replicas": 1}) as world:
        status = await world.until(is_ready)
        assert launcher.num_asked > NUM_LOOKS
        start_s = status.pools[2].start_s
        assert start_s is not None and start_s < WAIT_S / 2
