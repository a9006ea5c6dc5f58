"""What a key's account gives its calls: a tenant, salts of its own, a tier. Over HTTP and gRPC."""

from pathlib import Path

import httpx
import pytest

from diptych.cluster.client.client import Client
from diptych.cluster.common.config import NamedLevel, ServiceLevel
from diptych.cluster.front.access.accounts import Account
from diptych.cluster.front.access.key_file import KeyFile, NamedKey
from diptych.cluster.front.access.key_ring import KeyRing
from diptych.cluster.front.http.edge import AccessPolicy
from diptych.cluster.front.levels import ServiceLevels
from diptych.workers.common.errors import InvalidRequest
from diptych.workers.common.request import MAX_CACHE_SALT_BYTES, MAX_TENANT_BYTES, Request

from ....support.front import Echo, Served, served
from .test_key_file import write

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"
FILE = f"alice: {ALICE}\nbob: {{key: {BOB}, service_tier: flex}}"
TIERS = ServiceLevels(ServiceLevel(tiers={"flex": NamedLevel(ttft_s=60.0), "fast": NamedLevel(ttft_s=0.3)}))
CHAT = "/v1/chat/completions"
ROUTES = {
    "/v1/completions": {"prompt": "abc"},
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
}


def account(name: str) -> Account:
    return Account(NamedKey(name, b""), is_tenant=True)


def test_salts_of_tenants_never_meet() -> None:
    names, given = ("a", "b", "a" * MAX_TENANT_BYTES), ("", "a", "b", "\0a", "x" * MAX_CACHE_SALT_BYTES)
    salts = [account(name).cache_salt(salt) for name in names for salt in given]
    assert len(set(salts)) == len(salts) and max(map(len, salts)) <= MAX_CACHE_SALT_BYTES
    assert salts == [account(name).cache_salt(salt) for name in names for salt in given]


def test_without_a_file_a_clients_salt_is_the_tenant() -> None:
    found = KeyRing("sesame-sesame").find(b"Bearer sesame-sesame")
    assert found is not None
    assert (found.tenant, found.cache_salt("é")) == (b"", "é".encode())


def ask(server: Served, route: str, key: str, **fields: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(server.url + route, json={"max_tokens": 2, **ROUTES[route], **fields}, headers=headers)


def salt_and_tenant(request: Request) -> tuple[bytes, bytes]:
    return request.cache_salt, request.tenant


def test_every_request_is_of_its_keys_tenant(tmp_path: Path) -> None:
    ring = KeyRing(None, KeyFile(write(tmp_path / "keys", FILE)))
    source = Echo(laps=1)
    with served(source, access=AccessPolicy(ring), levels=TIERS) as server:
        for route in ROUTES:
            for salt in ({}, {"cache_salt": "mine"}):
                assert ask(server, route, ALICE, **salt).status_code == 200
        with Client(server.address, api_key=ALICE) as client:
            client.generate("abc", max_tokens=2)
            client.generate("abc", max_tokens=2, cache_salt="mine")
    alice = account("alice")
    expected = [(alice.cache_salt(salt), b"alice") for salt in ("", "mine")]
    assert [salt_and_tenant(request) for request in source.requests] == expected * 3


def test_a_salt_that_is_too_long_is_refused_as_before(tmp_path: Path) -> None:
    ring = KeyRing(None, KeyFile(write(tmp_path / "keys", FILE)))
    with served(Echo(laps=1), access=AccessPolicy(ring)) as server:
        refused = ask(server, "/v1/completions", ALICE, cache_salt="é" * 129)
    assert refused.status_code == 400 and "258 bytes; at most 256" in refused.json()["error"]["message"]


def test_a_key_may_be_bound_to_a_tier(tmp_path: Path) -> None:
    ring = KeyRing(None, KeyFile(write(tmp_path / "keys", FILE)))
    source = Echo(laps=1)
    with served(source, access=AccessPolicy(ring), levels=TIERS) as server:
        asked: list[dict[str, object]] = [{}, {"service_tier": "auto"}, {"service_tier": "flex"}]
        for tier in asked:
            assert ask(server, CHAT, BOB, **tier).status_code == 200
        refused = ask(server, CHAT, BOB, service_tier="fast")
        assert refused.json()["error"]["param"] == "service_tier" and "'flex'" in refused.json()["error"]["message"]
        assert ask(server, CHAT, ALICE, service_tier="fast").status_code == 200
        with Client(server.address, api_key=BOB) as client:
            client.generate("abc", max_tokens=2)
            with pytest.raises(InvalidRequest, match="not open to this API key"):
                client.generate("abc", service_tier="fast")
    assert [request.level.tier for request in source.requests] == ["flex"] * 3 + ["fast", "flex"]
