"""No byte from a socket is unpickled: no source calls what would, and no port runs what a pickle names."""

import ast
import os
import pickle
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from diptych.proto import inference_pb2

from ...support.front import Echo, served
from ...support.source import tree_of

ROOT = Path(__file__).parents[3]
# Functions that unpickle what they get: of torch, torch.distributed, multiprocessing, ZeroMQ, NumPy, joblib.
NAMES = re.compile(
    r"(all_gather_object|broadcast_object_list|gather_object|scatter_object_list|recv_object_list|connection\.Listener|"
    r"connection\.Client|recv_pyobj|read_pickle|Unpickler|joblib\.load)$"
)


class Trap:
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self._folder,)


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """File and name of every call in the package."""
    for room in ("cluster", "workers", "kernels"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(tree_of(path.read_text())):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func)
                    yield str(path.relative_to(ROOT)), name, node


def test_no_source_calls_what_unpickles() -> None:
    found: list[str] = []
    num = 0
    for file, name, node in calls():
        num += 1
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        unpickles = NAMES.search(name) or keywords.get("allow_pickle") == "True"
        if unpickles or (name == "torch.load" and keywords.get("weights_only") != "True"):
            found.append(f"{file}: {name}")
    assert num > 1000 and not found


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_is_sent_is_not_run(tmp_path: Path, protocol: int) -> None:
    folder = tmp_path / "made"
    trap = pickle.dumps(Trap(str(folder)), protocol)
    with served(Echo(laps=1)) as server:
        for kind in ("application/json", "application/octet-stream", "application/x-pickle"):
            answered = httpx.post(f"{server.url}/v1/completions", content=trap, headers={"content-type": kind})
            assert answered.status_code == 400
        with grpc.insecure_channel(server.address) as channel:
            path = f"/{inference_pb2.DESCRIPTOR.services_by_name['Inference'].full_name}/Generate"
            with pytest.raises(grpc.RpcError):
                next(channel.unary_stream(path)(trap, timeout=30))
        for port in (server.http_port, server.grpc_port):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
                sock.sendall(len(trap).to_bytes(4, "big") + trap)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc"}).status_code == 200
    assert not folder.exists()
    pickle.loads(trap)
    assert folder.exists()  # the trap is one
