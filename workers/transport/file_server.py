"""Passes descriptors of memory to processes of our user that know a token, over a Unix socket.

    receiver   dials -> looks whose socket it is -> says the token -> takes the descriptors -> keeps the connection
    server     accepts -> looks who dials -> hears the token -> passes the descriptors -> waits for the end

The connection tells each side that the other lives: the kernel ends it with the process. The socket has an abstract
name, which leaves nothing behind; another user may dial it, and is hung up on before a word is said.
"""

import asyncio
import hmac
import logging
import os
import secrets
import socket
import struct
import uuid
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from ..common.errors import TransportError
from ..kv.pool_pieces import close_all

TOKEN_BYTES = 32
MAX_NAME_CHARS = 100
MAX_DESCRIPTORS = 250  # the kernel passes 253 at once
TIMEOUT_S = 5.0
RETRY_S = 0.1  # after an error in accepting, as where there are no descriptors left
_HERE = b"\1"  # sent with the descriptors, which cannot be sent alone
_CREDENTIALS = struct.Struct("3i")  # pid, user, group

log = logging.getLogger("diptych.transport")


class FileServer:
    """Server of files that stay open meanwhile. It listens at once, on the running event loop. Raises OSError."""

    def __init__(self, *descriptors: int) -> None:
        self.name, self.token = f"diptych-{uuid.uuid4()}", secrets.token_bytes(TOKEN_BYTES)
        self._descriptors = descriptors
        with ExitStack() as unless_done:
            self._listener = unless_done.enter_context(_unix_socket())
            self._listener.bind(f"\0{self.name}")
            self._listener.listen()
            unless_done.pop_all()
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._accept)

    async def close(self) -> None:
        """Hang up on everybody."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    def _start(self, work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            await work()

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError as e:
                log.warning("a process that wants our KV pool's memory could not be answered: %s", e)
                await asyncio.sleep(RETRY_S)
                continue
            if user_of(client) == os.geteuid():
                self._start(lambda client=client: self._answer(client))
            else:
                client.close()

    async def _answer(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with client:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    token = await _receive(client, TOKEN_BYTES)
                if hmac.compare_digest(token, self.token):
                    socket.send_fds(client, [_HERE], self._descriptors)
                    await loop.sock_recv(client, 1)
            except (OSError, TimeoutError) as e:
                log.debug("a process that wanted our KV pool's memory was hung up on: %r", e)


def is_sound(name: str, token: bytes) -> bool:
    """Return whether these may be the name and the token of a FileServer."""
    return 0 < len(name) <= MAX_NAME_CHARS and "\0" not in name and len(token) == TOKEN_BYTES


async def receive_files(name: str, token: bytes, num: int = 1) -> tuple[socket.socket, list[int]]:
    """Receive the `num` descriptors that a FileServer passes, and the connection, which ends with that process. Raises
    TransportError."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        line = stack.enter_context(_unix_socket())
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await loop.sock_connect(line, f"\0{name}")
                if user_of(line) != os.geteuid():
                    raise TransportError("the socket that the source names belongs to another user")
                await loop.sock_sendall(line, token)
                descriptors = await _receive_descriptors(line, num)
        except (OSError, TimeoutError) as e:
            raise TransportError(f"the source does not pass its memory: {e!r}") from e
        stack.pop_all()
        return line, descriptors


def user_of(connection: socket.socket) -> int:
    """User of the process at the other end, as the kernel noted it when that began to listen or dialled."""
    return _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)


async def _receive(line: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = await asyncio.get_running_loop().sock_recv(line, num_bytes - len(data))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return data


async def _receive_descriptors(line: socket.socket, num: int) -> list[int]:
    await _until_readable(line)
    said, descriptors, flags, _ = socket.recv_fds(line, len(_HERE), num, socket.MSG_CMSG_CLOEXEC)
    is_cut = bool(flags & socket.MSG_CTRUNC)  # there were more
    if said == _HERE and len(descriptors) == num and not is_cut:
        return descriptors
    close_all(descriptors)
    if not said:
        raise ConnectionError("the connection was closed")
    raise ConnectionError(f"{'more than ' * is_cut}{len(descriptors)} descriptors came, not {num}")


async def _until_readable(line: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(line, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(line)
