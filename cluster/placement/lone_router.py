"""A router that the supervisor neither starts nor keeps: `diptych router`, as a Deployment runs it.

cluster found -> served, the fleet followed -> ready: a worker has joined it
                                            -> SIGTERM: not ready, open requests end -> listeners close
                                            -> another cluster has its name, or the front door failed: it ends
"""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace

from ray.exceptions import RayError

from ...workers.common.errors import DiptychError, Unavailable, from_wire
from ..common.deployment import Deployment
from ..common.handles import RouterStarted
from .router_actor import RouterActor
from .supervisor_name import Refused, found_supervisor

LOOK_S = 1.0


def lone(deployment: Deployment, num_routers: int) -> Deployment:
    """Deployment as one of `num_routers` has it: each enforces its share of the limits of API keys."""
    router = deployment.config.router.model_copy(update={"replicas": num_routers})
    return replace(deployment, config=deployment.config.model_copy(update={"router": router}))


async def serve_router(deployment: Deployment, on_ready: Callable[[RouterStarted], None], drain_s: float) -> int:
    """Serve until SIGTERM or Ctrl-C, then until no request is open, at most `drain_s`; return how many were cut off.
    `on_ready` is called once a worker has joined, for requests that came before would be refused. Raises
    DiptychErrors: Unavailable where the cluster was ended and started again."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    router = RouterActor(deployment)
    started = await router.start()
    if isinstance(started, Refused):
        raise from_wire(started.error, started.message)
    joining = asyncio.create_task(router.ready())
    failing = asyncio.create_task(until_failed(router, deployment))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([joining, failing, stopping], return_when=asyncio.FIRST_COMPLETED)
        if joining.done():
            on_ready(started)
            await asyncio.wait([failing, stopping], return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            raise failing.result()
        return await router.drain(drain_s)
    finally:
        for task in (joining, failing, stopping):
            task.cancel()
        await router.stop()


async def until_failed(router: RouterActor, deployment: Deployment) -> DiptychError:
    """Return why the router must end. Without a supervisor it goes on by its last view of the fleet."""
    name = deployment.config.name
    while True:
        await asyncio.sleep(LOOK_S)
        if refused := await router.alive():
            return from_wire(refused.error, refused.message)
        try:
            if await (await found_supervisor(name)).start_id.remote() != deployment.start_id:
                return Unavailable(f"the cluster {name!r} was started again: start this router again")
        except (RayError, Unavailable):
            continue
