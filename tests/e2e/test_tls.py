"""A cluster with TLS between its processes, as its clients and a stranger meet it."""

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ..support.cluster_harness import MODEL, diptych, serving

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]


def test_a_cluster_with_tls_answers_and_its_workers_refuse_strangers(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("tls") / "home"
    with serving(home, "--tls", "auto", "--transport", "grpc") as served:
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "timings": True}
        answer = httpx.post(f"{served.http_address}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 1
        # Its KV was handed off at the first attempt, by gRPC: on the ports that refuse others below.
        [timings] = answer.json()["timings"]
        assert (timings["transport"], timings["num_attempts"]) == ("grpc", 1) and timings["handoff_bytes"] > 0
        status = served.status()
        assert status["tls_until"].endswith("UTC")
        assert "TLS between processes" in diptych(served.home, "status").stdout
        for worker in status["workers"]:
            # Health needs no token, but a certificate.
            with grpc.insecure_channel(worker["address"]) as channel, pytest.raises(grpc.RpcError) as caught:
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        served.assert_nothing_is_held()
