import socket

import httpx
import pytest

from diptych.cluster.common.config import RouterConfig
from diptych.cluster.common.config_file import build
from diptych.cluster.common.deployment import Deployment
from diptych.cluster.front.responses.store import StoreLimits
from diptych.cluster.placement import router_process
from diptych.cluster.placement.router_process import RouterProcess, kept_responses
from diptych.cluster.routing.fleet import WorkerInfo
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.server.service import WorkerService

from ...support.harness import TINY
from ...support.routed import TOKEN, VOCAB_SIZE, InstantRunner


def test_settings_limit_the_responses_that_are_kept() -> None:
    assert kept_responses(RouterConfig()) == StoreLimits()
    given = RouterConfig(max_kept_responses=3, max_kept_response_bytes=5 << 20, kept_response_lifetime_s=7.5)
    assert kept_responses(given) == StoreLimits(max_bytes=5 << 20, max_entries=3, lifetime_s=7.5)


def process() -> RouterProcess:
    router = {"http_port": 0, "grpc_port": 0, "worker_timeout_s": 60}
    config = build({"model": str(TINY), "pools": {"mixed": {"replicas": 1}}, "router": router})
    return RouterProcess(Deployment(config, TOKEN, is_local=True))


async def test_a_router_that_starts_where_workers_serve_refuses_no_request() -> None:
    runner = InstantRunner(num_blocks=64, block_size=16, vocab_size=VOCAB_SIZE, max_context=1024)
    worker = WorkerService(WorkerConfig.of("fake", auth_token=TOKEN, transports=("grpc",)), runner)
    where = await worker.start()
    router = process()
    router.update_fleet([WorkerInfo(where.incarnation, where.address, role="mixed", pool="mixed")])
    port = (await router.start()).http_port
    try:
        async with httpx.AsyncClient() as client:
            body = {"prompt": "A", "max_tokens": 2}
            answer = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
    finally:
        await router.stop()
        await worker.stop()


async def test_a_worker_that_is_not_reached_does_not_keep_a_router_from_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_process, "JOIN_S", 0.2)
    router = process()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        router.update_fleet([WorkerInfo("incarnation", address, role="mixed", pool="mixed")])
        port = (await router.start()).http_port
        try:
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 503
        finally:
            await router.stop()
