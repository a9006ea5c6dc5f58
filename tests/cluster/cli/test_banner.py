"""The snippets that a person pastes are whole, for every kind of front door."""

import ast
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from diptych.cluster.cli.banner import banner
from diptych.cluster.common.config_file import build
from diptych.cluster.control.status import ClusterStatus, PoolStatus, RouterStatus
from diptych.cluster.preflight.checks import resolve_model

from ...support.gguf_vocabulary import write_bpe


def lines(model: Path, router: dict[str, Any], host: str = "127.0.0.1", name: str = "default") -> list[str]:
    pools = (PoolStatus("prefill", 1, 1, 0, 0, 1, 1), PoolStatus("decode", 2, 2, 0, 0, 2, 2))
    routers = (RouterStatus("router-1", "ready", host, 8123, 50123, 1),)
    status = ClusterStatus(name, str(model), 1, pools, (), routers)
    return banner(build({"model": str(model), "name": name, "router": router}), status, 9.87).splitlines()


def snippet(text: list[str], title: str) -> str:
    start = text.index(f"# {title}") + 1
    return "\n".join(text[start : text.index("", start)])


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("has_key", [True, False])
def test_snippets_are_whole(tmp_path: Path, is_chat: bool, has_key: bool) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"} if is_chat else {}))
    text = lines(tmp_path, {"api_key": "long enough"} if has_key else {})
    words = shlex.split(snippet(text, "curl"))
    assert words[:2] == ["curl", f"http://127.0.0.1:8123/v1/{'chat/' if is_chat else ''}completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == tmp_path.name
    assert ("messages" in body) is is_chat
    assert any("$DIPTYCH_API_KEY" in word for word in words) is has_key
    for title in ("Python, openai", "Python, gRPC"):
        code = snippet(text, title)
        ast.parse(code)
        assert ("DIPTYCH_API_KEY" in code) is has_key
    assert "long enough" not in "\n".join(text), "a key is not for a terminal"


@pytest.mark.parametrize("template", [{}, {"chat_template": "x"}])
def test_a_gguf_file_has_its_template_itself(tmp_path: Path, template: dict[str, str]) -> None:
    backend = tokenizers.Tokenizer.from_file(str(Path(resolve_model("tiny"), "tokenizer.json")))
    path = write_bpe(tmp_path / "m.gguf", backend, "gpt-2", **template)
    assert ("chat/completions" in snippet(lines(path, {}), "curl")) is bool(template)


def test_head_names_pools_and_addresses(tmp_path: Path) -> None:
    text = lines(tmp_path, {})
    assert text[0] == f"Ready in 9.9 s: {tmp_path.name} on 1 prefill + 2 decode"
    assert text[1] == "  HTTP http://127.0.0.1:8123/v1    gRPC 127.0.0.1:50123"
    assert "diptych scale decode=3" in text[-1]


def test_the_commands_name_a_cluster_that_has_a_name(tmp_path: Path) -> None:
    assert "--name" not in lines(tmp_path, {})[-1]
    last = lines(tmp_path, {}, name="other")[-1]
    assert "diptych status --name other " in last
    assert "diptych scale decode=3 --name other " in last


def test_tls_and_another_host(tmp_path: Path) -> None:
    tls = {"cert": "c", "key": "k"}
    router = {"host": "10.0.0.7", "api_key": "long enough", "http_tls": tls, "grpc_tls": tls}
    text = lines(tmp_path, router, host="10.0.0.7")
    assert "HTTP https://10.0.0.7:8123/v1    gRPC 10.0.0.7:50123" in text[1]
    assert "tls=True" in snippet(text, "Python, gRPC")


def test_a_wildcard_host_is_called_at_loopback(tmp_path: Path) -> None:
    assert "HTTP http://127.0.0.1:8123" in lines(tmp_path, {}, host="0.0.0.0")[1]


def test_without_a_router_it_says_how_to_start_one(tmp_path: Path) -> None:
    pools = (PoolStatus("decode", 2, 2, 0, 0, 2, 2),)
    status = ClusterStatus("a", str(tmp_path), 1, pools, (), ())
    assert status.state == "ready"
    config = build({"model": str(tmp_path), "name": "a", "router": {"replicas": 0}})
    text = banner(config, status, 9.87).splitlines()
    assert text[0] == f"Ready in 9.9 s: {tmp_path.name} on 2 decode"
    assert text[1] == "No router is started here: start one with `diptych router --name a`"
    assert text[-1].startswith("Watch it: diptych status --name a")
