"""What a rank host answers to whoever connects; tests/e2e/test_ranks_on_machines.py has real ranks."""

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from unittest.mock import patch

import pytest

from diptych.workers.common.errors import ConfigError, RankLost
from diptych.workers.kv.layout import KVLayout
from diptych.workers.models.plan.rank_settings import RankSettings
from diptych.workers.ranks.link_auth import prove_to_listener
from diptych.workers.ranks.local_ranks import LocalRanks
from diptych.workers.ranks.remote_ranks import LOST, RemoteRanks, SessionStart
from diptych.workers.server import rank_host
from diptych.workers.server.rank_host import RankHost

TOKEN = "secret"
LAYOUT = KVLayout("float32", block_size=16, num_layers=1, num_kv_heads=2, head_dim=16, model_id="m", tensor_parallel=2)
SETTINGS = RankSettings("none", LAYOUT, "float32", 64, 1, 2, rank=1, num_machines=2)


@pytest.fixture
def host() -> Iterator[tuple[RankHost, str]]:
    started = RankHost("127.0.0.1", 0, TOKEN)
    address = started.start_in_thread()
    yield started, address
    started.stop()
    assert started.ended.done()


def connect(address: str) -> "Connection[bytes, bytes]":
    name, _, port = address.partition(":")
    link = socket.create_connection((name, int(port)), 20.0)
    prove_to_listener(link, TOKEN)
    link.settimeout(None)
    return Connection(link.detach())


def test_other_hosts_than_loopback_need_a_token() -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        RankHost("10.0.0.1", 0, None)


def test_an_address_that_is_in_use_is_refused(host: tuple[RankHost, str]) -> None:
    with pytest.raises(ConfigError, match="cannot listen at"):
        RankHost("127.0.0.1", int(host[1].partition(":")[2]), TOKEN).start_in_thread()


@pytest.mark.parametrize("message", [b"what", b"{}", b"[1]", json.dumps({"session": "s", "version": 99}).encode()])
def test_messages_that_are_not_known_close_the_connection_alone(host: tuple[RankHost, str], message: bytes) -> None:
    with connect(host[1]) as connection:
        connection.send_bytes(message)
        with pytest.raises(EOFError):
            connection.recv_bytes()
    with connect(host[1]) as connection:  # and the next is heard
        assert not connection.poll()


def lost(address: str, settings: str) -> str:
    """What the host says to a worker with these settings of ranks."""
    with connect(address) as control, connect(address) as kv_link:
        kv_link.send_bytes(SessionStart("s").to_bytes())
        control.send_bytes(SessionStart("s", settings=settings).to_bytes())
        return control.recv_bytes().removeprefix(LOST).decode()


def test_settings_that_are_not_known_are_refused_by_name(host: tuple[RankHost, str]) -> None:
    unknown = json.dumps(asdict(SETTINGS) | {"colour": "blue"})
    assert "does not know the settings of ranks" in lost(host[1], unknown)
    assert "does not know the settings of ranks" in lost(host[1], "nothing")


def test_ranks_that_cannot_be_started_are_lost_by_name(host: tuple[RankHost, str]) -> None:
    with patch.object(LocalRanks, "start", side_effect=OSError("no more processes")):
        assert "could not be started, or their worker has gone: no more processes" in lost(host[1], SETTINGS.to_json())


def test_a_host_serves_one_worker_at_a_time(host: tuple[RankHost, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_host, "BEFORE_S", 0.2)
    has_started = threading.Event()
    with patch.object(LocalRanks, "start", lambda *_: has_started.set()):
        first = RemoteRanks(host[1], SETTINGS, TOKEN)
        assert has_started.wait(20.0)
        second = RemoteRanks(host[1], SETTINGS, TOKEN)
        assert second.hear() == "the rank host serves another worker: start one for each"
        second.close()
        first.close()
        monkeypatch.setattr(rank_host, "BEFORE_S", 20.0)
        third = RemoteRanks(host[1], SETTINGS, TOKEN)
        host[0].stop()
        said = third.hear() or ""
        assert "has ended" in said or "is stopping" in said
        third.close()


def test_a_host_with_another_token_is_refused(host: tuple[RankHost, str]) -> None:
    with pytest.raises(RankLost, match="another token"):
        RemoteRanks(host[1], SETTINGS, "other")
