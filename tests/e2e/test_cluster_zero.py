"""A pool goes to zero workers while there are no requests, and a request brings one back: its answer is as before."""

import json
import time
from pathlib import Path

import httpx
import pytest

from ..support.cluster_harness import END_S, MODEL, Served, diptych, serving

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

POOLS = """
pools:
  prefill: {replicas: 0}
  decode: {replicas: 0}
  mixed: {replicas: 1, min_replicas: 0, max_replicas: 1, scale_to_zero_after_s: 1}
"""


def answer(served: Served) -> str:
    body = {"model": MODEL, "prompt": "one two three", "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    response = httpx.post(f"{served.http_address}/v1/completions", json=body, timeout=END_S)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_a_pool_goes_to_zero_and_a_request_brings_a_worker_back(tmp_path: Path) -> None:
    (config := tmp_path / "cluster.yaml").write_text(POOLS)
    with serving(tmp_path / "home", "--config", str(config)) as served:
        before = answer(served)
        deadline = time.monotonic() + END_S
        while (status := served.status())["workers"]:
            assert time.monotonic() < deadline, status
        assert status["state"] == "ready" and status["pools"][2]["target"] == 0
        assert httpx.get(f"{served.http_address}/health").json()["status"] == "ready"
        assert answer(served) == before
        status = served.status()
        actions = [d["action"] for d in reversed(status["decisions"])]
        assert actions[:2] == ["1 -> 0 workers", "0 -> 1 workers"], json.dumps(status["decisions"])
        why = diptych(served.home, "status", "--why").stdout
        assert "1 request and no worker: a start of the pool takes up to" in " ".join(why.split())
