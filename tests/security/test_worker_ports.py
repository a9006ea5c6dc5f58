"""What of a worker a stranger can reach: another machine (here: another network namespace), or another user."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from diptych.proto import kv_pb2, kv_pb2_grpc

ROOT = Path(__file__).parents[2]
NOBODY = 65534
ALL_TLS = "tcp,posix,sysv,cma,self,cuda"
TIMEOUT_S = 30.0
OURS, THEIRS = "10.213.77.1", "10.213.77.2"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NIXL is for Linux")


@dataclass(frozen=True)
class Victim:
    process: "subprocess.Popen[str]"
    pid: int
    port: int  # of its gRPC server
    endpoint: str

    def listeners(self) -> set[tuple[str, int]]:
        """What it listens on, over IP."""
        connections = psutil.Process(self.pid).net_connections("inet")
        return {(c.type.name, c.laddr.port) for c in connections if c.type is socket.SOCK_DGRAM or c.status == "LISTEN"}

    def kv(self) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextmanager
def victim() -> Iterator[Victim]:
    command = [sys.executable, "-m", "tests.security.nixl_victim"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            yield Victim(process, **json.loads(process.stdout.readline()))
            process.stdin.close()
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()


def attack(endpoint: str, *, user: int = 0, tls: str = ALL_TLS, before: tuple[str, ...] = ()) -> str:
    """What came of a write into the worker's KV by NIXL itself."""
    command = [*before, sys.executable, "-m", "tests.security.nixl_stranger", endpoint, str(user), tls]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return "refused: UCX waits for an answer"
    return done.stdout.strip()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def cabled_namespace() -> Iterator[str]:
    """A network namespace at the other end of a cable. Skips where the kernel makes none."""
    name = f"diptych-{os.getpid()}"
    cable = f"dpt{os.getpid()}"
    try:
        try:
            ip("netns", "add", name)
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        except subprocess.CalledProcessError as e:
            pytest.skip(f"the kernel makes no network namespace, or no veth: {e.stderr.decode().strip()}")
        ip("address", "add", f"{OURS}/24", "dev", cable)
        ip("link", "set", cable, "up")
        ip("-n", name, "address", "add", f"{THEIRS}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", name, "link", "set", device, "up")
        yield name
    finally:
        for arguments in (("link", "delete", cable), ("netns", "delete", name)):
            with suppress(subprocess.CalledProcessError):
                ip(*arguments)


@pytest.fixture(scope="module")
def strangers_reach() -> Iterator[tuple[str, Victim]]:
    """A namespace and, started once the cable was there, a worker that several tests attack."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces, and becoming another user, need root and iproute2")
    with cabled_namespace() as name, victim() as process:
        yield name, process


@pytest.fixture
def namespace(strangers_reach: tuple[str, Victim]) -> str:
    return strangers_reach[0]


@pytest.fixture
def worker(strangers_reach: tuple[str, Victim]) -> Victim:
    return strangers_reach[1]


def test_what_a_worker_with_nixl_listens_on_and_shares() -> None:
    """It listens on its gRPC port alone; its shared memory is files without a name, mode 0600, none of System V's."""
    with victim() as own:
        assert own.listeners() == {("SOCK_STREAM", own.port)}
        modes = shared_memory_modes(own.pid)
        assert modes and set(modes) == {0o600}
        segments = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        assert not [line for line in segments if str(own.pid) in line.split()[4:6]]
        assert attack(own.endpoint) == "wrote"
        assert own.kv() == "written to"


def shared_memory_modes(pid: int) -> list[int]:
    """Permissions of a process's open shared memory files; it may open and close others at the same time."""
    modes: list[int] = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if "shm" in str(descriptor.readlink()):
                modes.append(descriptor.stat().st_mode & 0o777)
    return modes


def test_a_strangers_write_from_another_machine_does_not_reach_the_kv(worker: Victim, namespace: str) -> None:
    """Though it has the worker's NIXL endpoint, and UCX's TCP transport: it has but that in common with the worker."""
    there = ("ip", "netns", "exec", namespace)
    assert attack(worker.endpoint, tls="tcp,self,cuda", before=there).startswith("refused")
    assert worker.kv() == "intact" and worker.process.poll() is None


def test_no_port_of_a_worker_takes_a_strangers_bytes(worker: Victim, namespace: str) -> None:
    """Every port that it listens on is dialled from another machine, and is its gRPC server, which wants a token."""
    for _, port in worker.listeners():
        code = (
            "import socket, sys\n"
            f"s = socket.create_connection(('{OURS}', {port}), 5); s.settimeout(5)\n"
            "s.sendall(bytes(range(256)) * 64)\n"
            "print('talked to' if s.recv(1) else 'hung up on')"
        )
        done = subprocess.run(
            ["ip", "netns", "exec", namespace, sys.executable, "-c", code],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.stdout or "Error" in done.stderr
        assert status_without_token(port) is grpc.StatusCode.UNAUTHENTICATED
    assert worker.kv() == "intact" and worker.process.poll() is None


def test_another_users_write_does_not_reach_the_kv(worker: Victim) -> None:
    assert attack(worker.endpoint, user=NOBODY).startswith("refused")
    assert worker.kv() == "intact" and worker.process.poll() is None


def status_without_token(port: int) -> grpc.StatusCode:
    async def ask() -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                await kv_pb2_grpc.KVHandoffStub(channel).Abandon(kv_pb2.AbandonRequest(), timeout=10)
            except grpc.aio.AioRpcError as e:
                return e.code()
        return grpc.StatusCode.OK

    return asyncio.run(ask())
