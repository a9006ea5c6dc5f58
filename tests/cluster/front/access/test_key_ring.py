"""Who may call: the single key, the keys of a file, and what happens when the file changes."""

import logging
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from diptych.cluster.client.client import Client
from diptych.cluster.front.access.key_file import KeyFile
from diptych.cluster.front.access.key_ring import KeyRing
from diptych.cluster.front.http.edge import AccessPolicy
from diptych.workers.common.errors import ConfigError, Unauthenticated

from ....support.front import Echo, Served, served
from .test_key_file import write

SINGLE, ALICE, BOB, METRICS = "sesame-sesame", "sk-alice-0123456789", "sk-bob-0123456789", "only-for-metrics"


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def name_of(ring: KeyRing, header: bytes) -> str | None:
    found = ring.find(header)
    return None if found is None else found.name


def test_without_keys_everybody_may_call() -> None:
    ring = KeyRing()
    assert ring.is_open and ring.accepts(b"") and not ring.separates_tenants


def test_each_key_has_a_name(tmp_path: Path) -> None:
    ring = KeyRing(SINGLE, KeyFile(write(tmp_path / "keys", f"alice: {ALICE}\nbob: {BOB}")))
    assert [name_of(ring, bearer(key)) for key in (SINGLE, ALICE, BOB)] == ["default", "alice", "bob"]
    assert name_of(ring, f"bearer  {ALICE} ".encode()) == "alice"
    for wrong in (b"", b"Bearer", ALICE.encode(), f"Basic {ALICE}".encode(), bearer(ALICE[:-1]), bearer(ALICE + "x")):
        assert not ring.accepts(wrong)


def test_a_changed_file_counts_from_the_next_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "diptych.keys")
    path = write(tmp_path / "keys", f"alice: {ALICE}")
    ring = KeyRing(None, KeyFile(path))
    write(path, f"bob: {BOB}")
    ring.reload()
    assert ring.accepts(bearer(BOB)) and not ring.accepts(bearer(ALICE))
    for _ in range(3):
        write(path, "bob: [")
        ring.reload()
    assert ring.accepts(bearer(BOB)) and ring.num_failed_loads == 3
    path.unlink()
    ring.reload()
    assert ring.accepts(bearer(BOB)) and ring.num_failed_loads == 4
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2 and all("the API keys stay as they were" in error for error in errors)
    write(path, f"bob: {BOB}\nalice: {ALICE}")
    ring.reload()
    assert ring.accepts(bearer(ALICE)) and BOB not in caplog.text


def test_no_router_starts_with_a_file_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyRing(SINGLE, KeyFile(write(tmp_path / "keys", f"alice: {ALICE}", 0o644)))


def get(server: Served, path: str, key: str) -> httpx.Response:
    return httpx.get(server.url + path, headers={"authorization": f"Bearer {key}"})


def test_http_and_grpc_take_the_same_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", f"alice: {ALICE}")
    ring = KeyRing(SINGLE, KeyFile(path))
    with served(Echo(laps=1), access=AccessPolicy(ring)) as server:
        for key in (SINGLE, ALICE):
            assert get(server, "/v1/models", key).status_code == 200
            with Client(server.address, api_key=key) as client:
                assert client.generate("abc", max_tokens=3).text == "abc"
        write(path, f"bob: {BOB}")
        server.loop.call_soon_threadsafe(ring.reload)
        assert get(server, "/v1/models", SINGLE).status_code == 200  # its turn comes after the reload
        assert get(server, "/v1/models", ALICE).json()["error"]["code"] == "invalid_api_key"
        with Client(server.address, api_key=ALICE) as client, pytest.raises(Unauthenticated):
            client.generate("abc")


def test_the_keys_of_a_file_do_not_open_the_metrics(tmp_path: Path) -> None:
    def ring(single: str | None) -> KeyRing:
        return KeyRing(single, KeyFile(write(tmp_path / "keys", f"alice: {ALICE}")))

    with served(Echo(), access=AccessPolicy(ring(SINGLE), METRICS)) as server:
        status = [get(server, "/metrics", key).status_code for key in (SINGLE, METRICS, ALICE)]
        assert status == [200, 200, 401]
        families = text_string_to_metric_families(get(server, "/metrics", METRICS).text)
    samples = {s.name: s.value for family in families for s in family.samples}
    assert samples["diptych_api_keys"] == 2 and samples["diptych_api_key_file_failures_total"] == 0
    with served(Echo(), access=AccessPolicy(ring(None))) as server:
        assert get(server, "/metrics", ALICE).status_code == httpx.get(f"{server.url}/metrics").status_code == 401
