"""Router processes over worker processes, without Ray: each may be killed."""

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from diptych.cluster.common.config_file import build
from diptych.cluster.common.deployment import Deployment
from diptych.cluster.placement.router_process import RouterProcess
from diptych.cluster.routing.fleet import WorkerInfo

from .harness import WorkerHandle
from .routed import start_process


async def serve(pipe: Connection, stop: asyncio.Event, model: str, workers: Sequence[WorkerInfo]) -> None:
    pools = {worker.role: {"replicas": 1} for worker in workers}
    config = build({"model": model, "pools": pools, "router": {"http_port": 0, "grpc_port": 0}})
    process = RouterProcess(Deployment(config, "", is_local=True))
    process.update_fleet(workers)
    started = await process.start()
    while not all(worker.is_up for worker in process.router.workers()):
        await asyncio.sleep(0.01)
    pipe.send((started.http_port, started.grpc_port))
    await stop.wait()
    await process.stop()


@dataclass(frozen=True)
class LoneRouter:
    http_port: int
    grpc_port: int
    process: BaseProcess

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        self.process.kill()
        self.process.join()


@contextmanager
def lone_routers(model: Path, handles: Sequence[WorkerHandle], num: int) -> Generator[list[LoneRouter]]:
    """Routers that have a link to each worker."""
    infos = [WorkerInfo(h.incarnation, h.address, h.role, h.role) for h in handles]
    started: list[tuple[BaseProcess, Connection]] = []
    try:
        for _ in range(num):
            started.append(start_process(serve, str(model), infos))
        routers: list[LoneRouter] = []
        for process, pipe in started:
            http_port, grpc_port = pipe.recv()
            routers.append(LoneRouter(http_port, grpc_port, process))
        yield routers
    finally:
        for process, pipe in reversed(started):
            pipe.close()
            process.join(20)
            process.kill()
            process.join()
            process.close()
