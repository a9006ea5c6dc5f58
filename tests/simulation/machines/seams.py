"""The seams between the code that is shipped and the simulated world: names in its modules, replaced for one run."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from diptych.cluster.control import budgets, worker_control
from diptych.cluster.routing import kv_costs, request_driver, router, worker_link
from diptych.workers.engine.engine import Engine
from diptych.workers.handoff import pull as handoff_pull
from diptych.workers.handoff import sink as handoff_sink
from diptych.workers.handoff import source as handoff_source
from diptych.workers.kv import bridge as kv_bridge
from diptych.workers.sampling import grammar_masks
from diptych.workers.server import service
from diptych.workers.transport.grpc import GrpcTransport

from ..processes.constraints import FakeCompiler, fill_masks
from ..processes.drafts import SimDrafter, SimModelDrafter, speculates
from ..processes.splits import split_some
from ..processes.worker import SimEngineThread, SimRdma, WatchedBridge
from .rpc import SimChannel, SimServer

if TYPE_CHECKING:
    from ..world import World

LOAD_REPEAT_S = 1.0
USUAL_PROMPT = 16.0  # tokens: a worker has room for a hundred
EPOCH_NS = 10**18


def _silent(*_: object, **__: object) -> None:
    """Do nothing, instead of something that a simulated process does not do."""


class _Health:
    class HealthServicer:
        async def set(self, *_: object) -> None:
            pass


@contextmanager
def replaced(world: "World") -> Iterator[None]:
    """The seams between the real code and this world."""
    number = itertools.count()

    def transports(names: Any, regions: Any, device: None, rank_links: Any, *, has_rdma: bool) -> dict[str, Any]:
        assert not rank_links
        worker = this_worker()
        assert [*regions] == [worker.runner.memory.region, worker.staging.region]
        made: dict[str, Any] = {"nixl": SimRdma(world, worker.runner, worker.staging)} if "nixl" in names else {}
        return made | {"grpc": GrpcTransport()}

    def this_worker() -> Any:
        return world.workers[asyncio.get_running_loop().name]  # type: ignore[attr-defined]

    def engine(*args: Any, **settings: Any) -> Engine:
        runner, drafter = this_worker().runner, None
        if runner.proposer is not None:
            drafter = SimModelDrafter(world.seed, runner.proposer)
        elif speculates(world.seed) and not runner.looks_ahead:
            drafter = SimDrafter(world.seed)
        return Engine(*args, **settings | {"clock": asyncio.get_running_loop().time, "drafter": drafter})

    health = SimpleNamespace(aio=_Health, SERVICE_NAME="health")

    def channel(address: str, tls: None = None) -> SimChannel:
        return SimChannel(world.network, world.weather, address)

    seams: list[tuple[Any, str, Any]] = [
        (service, "make_server", lambda token: SimServer(world.network, world.on_release)),
        (service, "bind", lambda server, host, port, credentials: 1),
        (service, "make_transports", transports),
        (service, "EngineThread", partial(SimEngineThread, world)),
        (service, "Engine", engine),
        (service, "health", health),
        (service, "health_pb2_grpc", SimpleNamespace(add_HealthServicer_to_server=_silent)),
        (service, "reflection", SimpleNamespace(enable_server_reflection=_silent, SERVICE_NAME="reflection")),
        (service, "uuid", SimpleNamespace(uuid4=lambda: this_worker().incarnation)),
        (service, "Staging", lambda: this_worker().staging),
        (handoff_pull, "Bridge", partial(WatchedBridge, world)),
        (kv_bridge, "PART_BYTES", world.part_bytes),
        (service, "LOAD_REPEAT_S", LOAD_REPEAT_S),
        (handoff_source, "CHUNK_BYTES", world.chunk_bytes),
        (handoff_sink, "open_channel", channel),
        (worker_link, "open_channel", channel),
        (request_driver, "secrets", SimpleNamespace(token_hex=lambda _: f"handoff-{next(number)}")),
        (request_driver, "RequestState", world.make_state),
        (request_driver, "choose", split_some(world.seed)),
        (router, "RouterMetrics", _NoMetrics),
        (kv_costs, "MIN_MEASURED_TOKENS", 1 << 30),  # computing takes no virtual time within a step
        (kv_costs, "DEFAULT_PREFILL_TOKENS_S", world.prefill_tokens_s),
        (worker_control, "open_channel", channel),
        (budgets, "USUAL_PROMPT", USUAL_PROMPT),
        (service.GrammarCompiler, "of_folder", lambda *_: FakeCompiler()),
        (grammar_masks, "fill_next_token_bitmask_par", fill_masks),
        (grammar_masks, "LLExecutor", _silent),
        (time, "time_ns", lambda: EPOCH_NS + int(world.clock.now * 1e9)),
        (time, "monotonic", lambda: asyncio.get_running_loop().time()),
    ]
    kept = [(where, name, getattr(where, name)) for where, name, _ in seams]
    log, handler = logging.getLogger("diptych"), _CrashLog(world.crash)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.ERROR)
    for where, name, new in seams:
        setattr(where, name, new)
    try:
        yield
    finally:
        for where, name, old in kept:
            setattr(where, name, old)
        log.setLevel(level)
        log.removeHandler(handler)


class _CrashLog(logging.Handler):
    """Log handler that treats each error logged by the code under test as a bug: the simulation makes none itself."""

    def __init__(self, crash: Callable[[str, object], None]) -> None:
        super().__init__(logging.ERROR)
        self._crash = crash

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._crash(f"logged: {record.getMessage()} {error!r}", error)


class _NoMetrics:
    """Prometheus costs more than a run."""

    def __init__(self, views: object) -> None:
        pass

    def __getattr__(self, name: str) -> "_NoMetrics":
        return self

    def __call__(self, *_: object) -> None:
        pass
