"""Watches routers: asks each for its load, over and over, at the address at which clients reach it.

names are resolved, again and again ── a new address ──> asked every PERIOD_S ── it leaves its name ──> forgotten
                                                         └── refused, reset, or silent for SILENT_S: not reached

A router that the proxy could not reach is not used until it has told again.
"""

import asyncio
import ipaddress
import logging
import random
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

import httpx

from ...workers.common.errors import ConfigError, DiptychError, InternalError
from ..common.admission import RouterLoad
from .choice import RouterView

log = logging.getLogger("diptych.picker")

PERIOD_S = 0.1  # between two questions to a router
ROUTER_S = 0.01  # for each router: with many, each is asked less often
RESOLVE_S = 1.0
TIMEOUT_S = 1.0
SILENT_S = 3.0
MAX_LOAD_BYTES = 64 << 10
MAX_ROUTERS = 1024
NO_SUCH_NAME = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})  # answers; other errors are the lack of one


@dataclass(frozen=True, slots=True)
class RouterAccess:
    """Way to ask routers. `key`: their metrics key or API key; `tls`: verifies their certificates, by `name` where
    that is not their address; None: they speak plain HTTP."""

    key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    name: str | None = None


def read_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host.strip("[]") or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{text!r} is no router: give HOST:PORT, its HTTP port, as in diptych-routers:8000")
    return host.strip("[]"), int(port)


def endpoint_of(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class RouterWatch:
    """Watch of one router."""

    def __init__(self, endpoint: str, client: httpx.AsyncClient, access: RouterAccess) -> None:
        self._endpoint = endpoint
        self._client = client
        self._url = f"{'https' if access.tls else 'http'}://{endpoint}/load"
        self._extensions = {"sni_hostname": access.name} if access.name else {}
        self._load: RouterLoad | None = None
        self._is_reachable = False
        self._told_at = float("-inf")
        self._num_sent = 0
        self._problem = ""
        self._num_doubts = 0
        self._num_settled = 0  # doubts before a question that it has answered
        self._wake = asyncio.Event()
        self.was_asked = asyncio.Event()

    @property
    def view(self) -> RouterView:
        is_reachable = self._is_reachable and self._num_doubts == self._num_settled
        return RouterView(self._endpoint, self._load, is_reachable, self._num_sent)

    def sent(self) -> None:
        """Note that a request was sent there."""
        self._num_sent += 1

    def doubt(self) -> None:
        """Do not use it until it has told again."""
        self._num_doubts += 1
        self._wake.set()

    async def run(self, period_s: float) -> None:
        """Ask until cancelled. Routers are not all asked at once."""
        await asyncio.sleep(random.uniform(0, min(period_s, PERIOD_S)))
        while True:
            num_sent, num_doubts = self._num_sent, self._num_doubts
            self._wake.clear()
            try:
                async with asyncio.timeout(SILENT_S):  # httpx limits each wait, not the whole
                    self._take(await self._ask(), num_sent)
                    self._num_settled = num_doubts
            except (httpx.HTTPError, httpx.InvalidURL, OSError, DiptychError) as e:  # an OSError is a TimeoutError, too
                self._lose(e)
            self.was_asked.set()
            try:
                async with asyncio.timeout(period_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _ask(self) -> RouterLoad:
        async with self._client.stream("GET", self._url, extensions=self._extensions) as answer:
            body = b""
            async for chunk in answer.aiter_bytes():
                body += chunk
                if len(body) > MAX_LOAD_BYTES:
                    raise InternalError(f"it told more than {MAX_LOAD_BYTES} bytes")
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            raise ConfigError("the key is refused: give the routers' metrics key, or their API key")
        if answer.status_code != HTTPStatus.OK:
            raise InternalError(f"GET /load was answered {answer.status_code}: is it a router of this version?")
        try:
            return RouterLoad.from_json(httpx.Response(200, content=body).json())
        except (ValueError, RecursionError) as e:
            raise InternalError("GET /load was not answered with JSON: is it a router?") from e

    def _take(self, load: RouterLoad, num_sent: int) -> None:
        if not self._is_reachable:
            log.info("router %s is reached", self._endpoint)
        self._load, self._is_reachable, self._problem = load, True, ""
        self._told_at = asyncio.get_running_loop().time()
        self._num_sent -= num_sent  # those it counts itself

    def _lose(self, error: Exception) -> None:
        is_slow = isinstance(error, httpx.TimeoutException | TimeoutError)
        if is_slow and asyncio.get_running_loop().time() - self._told_at < SILENT_S:
            return
        problem = "it does not answer" if is_slow else str(error) or type(error).__name__
        if problem != self._problem:
            log.warning("router %s is not reached: %s", self._endpoint, problem)
        self._is_reachable, self._problem, self._num_sent = False, problem, 0


class Routers:
    """The routers behind some names. `start` and `stop` on one event loop."""

    def __init__(self, names: Sequence[str], access: RouterAccess) -> None:
        """`names`: HOST:PORT each. Raises ConfigError."""
        self._names = [read_address(name) for name in names]
        if not self._names:
            raise ConfigError("no router is named: give --router HOST:PORT")
        self._access = access
        self._watches: dict[str, RouterWatch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._resolved: dict[str, list[str]] = {}  # names that were answered once
        self._failing: set[str] = set()
        self._is_synced = asyncio.Event()

    async def start(self) -> None:
        access = self._access
        headers = {} if access.key is None else {"authorization": f"Bearer {access.key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        verify = access.tls or ssl.create_default_context()
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=TIMEOUT_S,
            limits=limits,
            verify=verify,
            trust_env=False,
        )
        self._following = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        tasks = [self._following, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    @property
    def is_synced(self) -> bool:
        """Return whether every name has been answered, and every router that they lead to asked once."""
        return self._is_synced.is_set()

    async def synced(self) -> None:
        await self._is_synced.wait()

    def views(self) -> list[RouterView]:
        return [watch.view for watch in self._watches.values()]

    def sent(self, endpoint: str) -> None:
        """Note that a request was sent there."""
        if endpoint in self._watches:
            self._watches[endpoint].sent()

    def doubt(self, endpoint: str) -> None:
        """Ask it again before it is used."""
        if endpoint in self._watches:
            self._watches[endpoint].doubt()

    async def _follow(self) -> None:
        while True:
            self._reconcile(await self._resolve())
            await asyncio.gather(*(watch.was_asked.wait() for watch in self._watches.values()))
            if all(_is_address(host) or host in self._resolved for host, _ in self._names):
                self._is_synced.set()
            await asyncio.sleep(RESOLVE_S)

    async def _resolve(self) -> list[str]:
        """Endpoints of all names. A name that cannot be resolved now leads to where it led."""
        found: dict[str, None] = {}
        for host, port in self._names:
            if _is_address(host):
                addresses = [host]
            else:
                addresses = await self._addresses(host)
            found |= dict.fromkeys(endpoint_of(address, port) for address in addresses)
        if len(found) > MAX_ROUTERS:
            log.warning("the names lead to %d addresses: the first %d are used", len(found), MAX_ROUTERS)
        return list(found)[:MAX_ROUTERS]

    async def _addresses(self, host: str) -> list[str]:
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as e:
            if host not in self._failing:
                log.warning("cannot resolve %s: %s", host, e)
            self._failing.add(host)
            if isinstance(e, UnicodeError) or e.errno in NO_SUCH_NAME:
                self._resolved.setdefault(host, [])
            return self._resolved.get(host, [])  # a name server that does not answer has not said that there is none
        self._failing.discard(host)
        self._resolved[host] = sorted({str(info[4][0]) for info in infos})
        return self._resolved[host]

    def _reconcile(self, endpoints: Sequence[str]) -> None:
        period_s = max(PERIOD_S, ROUTER_S * len(endpoints))
        for endpoint in [each for each in self._watches if each not in endpoints]:
            del self._watches[endpoint]
            self._tasks.pop(endpoint).cancel()
            log.info("router %s has left", endpoint)
        for endpoint in endpoints:
            if endpoint not in self._watches:
                watch = self._watches[endpoint] = RouterWatch(endpoint, self._client, self._access)
                self._tasks[endpoint] = asyncio.create_task(watch.run(period_s))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
