"""Readiness over a real router and real workers, whose engines can be made to hang while their event loops answer."""

import threading

from diptych.cluster.front.readiness import PERIOD_S, Readiness
from diptych.cluster.routing.fleet import WorkerInfo
from diptych.cluster.routing.policy import RoutingConfig
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.sequence import SampledToken
from diptych.workers.server.service import WorkerService
from diptych.workers.testing.fake_runner import FakeRunner
from diptych.workers.testing.fake_stream import FakeStep

from ...support.routing import routing, settled


class HangingRunner(FakeRunner):
    """Computes nothing while `gate` is clear, as a GPU does that hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def _compute(self, step: FakeStep) -> list[SampledToken]:
        self.gate.wait()
        return super()._compute(step)


class WorkerUnderTest:
    """Decode-capable worker as `routing` takes it."""

    def __init__(self) -> None:
        self.runner = HangingRunner()
        config = WorkerConfig.of(model="fake", role="mixed", transports=("grpc",))
        self.service = WorkerService(config, self.runner)
        self.info = WorkerInfo("", "", role="mixed", pool="mixed")

    async def start(self) -> None:
        at = await self.service.start()
        self.info = WorkerInfo(at.incarnation, at.address, role="mixed", pool="mixed")


class Clock:
    """Time in seconds, which passes when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_an_engine_that_hangs_is_not_ready_although_its_worker_answers() -> None:
    worker, clock = WorkerUnderTest(), Clock()
    await worker.start()
    try:
        async with routing(worker, config=RoutingConfig()) as router:  # type: ignore[arg-type]
            readiness = Readiness(router, timeout_s=30.0, clock=clock)
            assert (await readiness.decoding()).ready
            assert worker.runner.num_steps == 2, "a prefill and a decode step"
            # a report of that decode step that comes later would count as a proof of a decode step meanwhile
            await settled(router, lambda: sum(router.health().decode_tokens.values()) > 0)
            impatient = Readiness(router, timeout_s=0.2, clock=clock)
            worker.runner.gate.clear()
            clock.now += 2 * PERIOD_S
            found = await impatient.decoding()
            assert (found.ready, readiness.health().ready) == (False, True)
            assert "0.2 s" in found.problem
            worker.runner.gate.set()
            clock.now += PERIOD_S
            await settled(router, lambda: router.health().num_requests == 0)
            assert (await readiness.decoding()).ready
    finally:
        worker.runner.gate.set()
        await worker.service.stop()
