"""Every call to a worker asks for a token, and every route of a router but its health, version and description for a
key.
"""

import grpc
import grpc.aio
import httpx
import pytest
from google.protobuf.descriptor import MethodDescriptor

from diptych.cluster.front.http.metrics import ROUTES
from diptych.proto import inference_pb2, kv_pb2, worker_pb2
from diptych.workers.common.channel import auth_metadata, open_channel
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.server.service import WorkerService
from diptych.workers.testing.fake_runner import FakeRunner

from ...support.front import Echo, served

TOKEN = "the cluster's token"
ASSET = "/dashboard/assets/app.js"  # the page and its files tell nothing; their data needs a key
OPEN = {"/health", "/health/decode", "/version", "/openapi.json", "/dashboard", ASSET}
OF_WORKERS = [
    method
    for module in (worker_pb2, kv_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
OF_ROUTERS = list(inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods)
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


METHODS = (*OF_WORKERS, *OF_ROUTERS)
UNARY = {path_of(method) for method in METHODS if not method.client_streaming and not method.server_streaming}
STREAMED = {REFLECTION} | {path_of(method) for method in METHODS if method.client_streaming}


async def status_of(channel: grpc.aio.Channel, path: str, token: str | None) -> grpc.StatusCode:
    """Status of a call; OK where an answer comes."""
    metadata = auth_metadata(token)
    if path in UNARY:
        call = channel.unary_unary(path)(b"", metadata=metadata, timeout=20)
        return await call.code()
    if path in STREAMED:
        call = channel.stream_stream(path)(metadata=metadata, timeout=20)
    else:
        call = channel.unary_stream(path)(b"", metadata=metadata, timeout=20)
    try:
        return grpc.StatusCode.OK if await call.read() is not grpc.aio.EOF else await call.code()
    except grpc.aio.AioRpcError as e:
        return e.code()
    finally:
        call.cancel()


@pytest.mark.parametrize("path", [*map(path_of, OF_WORKERS), REFLECTION])
async def test_a_worker_answers_no_call_without_the_token(path: str) -> None:
    service = WorkerService(WorkerConfig.of(model="fake", auth_token=TOKEN), FakeRunner())
    where = await service.start()
    try:
        async with open_channel(where.address) as channel:
            for token in (None, "another token", TOKEN[:-1]):
                assert await status_of(channel, path, token) is grpc.StatusCode.UNAUTHENTICATED
            if path not in STREAMED:  # they wait for a message
                assert await status_of(channel, path, TOKEN) is not grpc.StatusCode.UNAUTHENTICATED
    finally:
        await service.stop(grace_s=0.0)


@pytest.mark.parametrize("path", [*map(path_of, OF_ROUTERS), REFLECTION])
async def test_a_router_answers_no_grpc_call_without_a_key(path: str) -> None:
    with served(Echo(), api_key="sesame-sesame") as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            for token in (None, "another key"):
                assert await status_of(channel, path, token) is grpc.StatusCode.UNAUTHENTICATED


def test_no_route_but_health_version_description_and_page_is_open() -> None:
    with served(Echo(), api_key="sesame-sesame") as server, httpx.Client(base_url=server.url) as http:
        for path in (*ROUTES, ASSET, "/v1/models/echo", "/v1/none"):
            for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
                is_refused = http.request(method, path).status_code == 401
                assert is_refused == (path not in OPEN), (method, path)
