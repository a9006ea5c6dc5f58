"""`diptych router` and `diptych drain`: for an orchestrator that scales routers, and ends machines."""

import asyncio
import platform
import sys
import time
from typing import Annotated

import typer
from rich.console import Console

from ...workers.common.errors import Unavailable
from ...workers.common.event_loop import new_event_loop
from ...workers.config.extras import check_installed
from ..common.handles import RouterStarted
from ..common.plurals import count

POLL_S = 0.5

Name = Annotated[str, typer.Option(help="The cluster's name.")]


def router(
    name: Name = "default",
    of: Annotated[int, typer.Option(min=1, help="Routers that share the limits of API keys: the most of them.")] = 1,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the cluster.")] = 600.0,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that open requests get after SIGTERM.")] = 600.0,
) -> None:
    """Run one more router of a running cluster in this process, until SIGTERM. The supervisor does not keep it."""
    check_installed("`diptych router`")
    from ..placement.remote import connected

    console = Console(file=sys.stdout)  # which is another while connected

    def announce(at: RouterStarted) -> None:
        console.print(f"Ready: HTTP {at.host}:{at.http_port}    gRPC {at.host}:{at.grpc_port}", soft_wrap=True)

    with connected(name, wait) as supervisor, asyncio.Runner(loop_factory=new_event_loop) as runner:
        # Imports Ray, which reads its environment once: only after it was joined.
        from ..placement.lone_router import lone, serve_router

        num_left = runner.run(serve_router(lone(supervisor.deployment(), of), announce, drain))
    console.print(f"ended with {count(num_left, 'request')} open" if num_left else "ended, no request was open")


def drain(
    name: Name = "default",
    node: Annotated[str | None, typer.Option(help="Machine, by its host name; default: this one.")] = None,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for it.")] = 600.0,
) -> None:
    """Move what the workers of a machine compute to others, and wait until they have ended. Others start in their
    place."""
    from ..placement.remote import connected

    node = node or platform.node()
    deadline = time.monotonic() + timeout
    with connected(name) as supervisor:
        drained = set(supervisor.drain_node(node))  # their successors may start on the same machine
        while left := sorted(drained & {w.worker_id for w in supervisor.status().workers}):
            if time.monotonic() > deadline:
                raise Unavailable(f"after {timeout:g} s there is still {', '.join(left)} on {node}")
            time.sleep(POLL_S)
    Console().print(f"{count(len(drained), 'worker')} left {node}", soft_wrap=True)
