"""What of a KV pool that workers of one machine share a stranger gets: another user, and who was passed it."""

import asyncio
import fcntl
import mmap
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from diptych.proto import kv_pb2
from diptych.workers.common.errors import TransportError
from diptych.workers.kv.memory import KVMemory
from diptych.workers.transport.file_server import receive_files
from diptych.workers.transport.shared_memory import SharedMemoryTransport

from ..support.handoff_pair import SMALL, make_memory

NOBODY = 65534

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux's")


@asynccontextmanager
async def source() -> AsyncIterator[tuple[kv_pb2.SharedMemoryEndpoint, KVMemory]]:
    """What a sink receives over gRPC, and the pool."""
    memory, opened = make_memory(SMALL, 4, seed=1, in_file=True), kv_pb2.Opened()
    transport = SharedMemoryTransport(memory.region)
    try:
        transport.publish(opened)
        yield opened.shared_memory, memory
    finally:
        await transport.close()


STRANGER = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
line = socket.socket(socket.AF_UNIX)
line.settimeout(20)
try:
    line.connect("\\0" + sys.argv[2])
    line.sendall(bytes.fromhex(sys.argv[3]))
    said, descriptors, *_ = socket.recv_fds(line, 1, 1)
except OSError:
    said, descriptors = b"", []
print("got it" if descriptors else "nothing")
"""


@pytest.mark.parametrize(("user", "expected"), [(NOBODY, "nothing"), (0, "got it")])
async def test_another_user_gets_nothing_though_it_knows_the_token(user: int, expected: str) -> None:
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    async with source() as (endpoint, _):
        arguments = ("-c", STRANGER, str(user), endpoint.socket, endpoint.token.hex())
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        assert said.decode().strip() == expected


IMPOSTOR = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + sys.argv[2])
listener.listen()
print("ready", flush=True)
line, _ = listener.accept()
print(len(line.recv(32)), flush=True)
"""


async def test_another_users_socket_hears_no_token() -> None:
    """The name of an ended source, which any process may take."""
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    name, pipe = f"impostor-{os.getpid()}", asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", IMPOSTOR, str(NOBODY), name, stdout=pipe)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    with pytest.raises(TransportError, match="another user"):
        await receive_files(name, b"x" * 32)
    assert await process.stdout.readline() == b"0\n"
    await process.wait()


async def test_what_is_passed_cannot_be_written_nor_made_shorter() -> None:
    """Nor opened again for it; while its owner writes on."""
    async with source() as (endpoint, theirs):
        line, [fd] = await receive_files(endpoint.socket, endpoint.token)
        try:
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 4096)
            with pytest.raises(OSError):
                os.ftruncate(fd, 0)
            with suppress(OSError):  # of a mounted file this fails already
                again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
                for attempt in (
                    lambda: mmap.mmap(again, 4096),
                    lambda: os.pwrite(again, b"x", 0),
                    lambda: os.ftruncate(again, 0),
                ):
                    with pytest.raises(OSError):
                        attempt()
                os.close(again)
            assert theirs.region.view is not None
            theirs.region.view[0] ^= 0xFF
            assert os.pread(fd, 1, 0) == bytes(theirs.region.view[:1])
        finally:
            line.close()
            os.close(fd)
