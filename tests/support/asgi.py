"""The front door in the test's own process, without a socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from starlette.types import Receive, Scope, Send

from diptych.cluster.front.front_door import FrontDoor
from diptych.cluster.front.http.api import make_app
from diptych.cluster.front.http.connection import CLIENT, ClientPresence
from diptych.cluster.routing.router import Router
from diptych.cluster.tokens.tokenizer import Tokenizer


@asynccontextmanager
async def http_client(router: Router, checkpoint: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Client of a front door over `router`, from when that is ready."""
    while not router.health().ready:
        await asyncio.sleep(0.01)
    door = FrontDoor(router, Tokenizer.load(checkpoint))
    app = make_app(door)

    async def connected(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {CLIENT: ClientPresence()}}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(connected), base_url="http://test") as client:
        yield client
    await door.close()
