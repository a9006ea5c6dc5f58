"""Text that `diptych serve` prints when it is ready: its addresses, and three snippets that work as they are pasted."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from ...workers.models.gguf.gguf_files import read_gguf
from ..common.config import DEFAULT_NAME, LOOPBACK_HOSTS, WILDCARD_HOSTS, ClusterConfig
from ..control.status import ClusterStatus, RouterStatus

QUESTION = "What is Diptych?"
MAX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class _Door:
    base_url: str  # http(s)://host:port/v1
    target: str  # host:port of gRPC
    model: str
    is_chat: bool
    has_key: bool
    has_grpc_tls: bool


def banner(config: ClusterConfig, status: ClusterStatus, ready_s: float) -> str:
    """Plain text, for a status whose first router is ready, or that has none."""
    pools = " + ".join(f"{p.num_ready} {p.name}" for p in status.pools if p.target)
    name = "" if config.name == DEFAULT_NAME else f" --name {config.name}"
    commands = f"Watch it: diptych status{name}    Resize it: diptych scale {_example_scale(status)}{name}    "
    commands += "Stop it: Ctrl-C"
    if not status.routers:
        start = f"No router is started here: start one with `diptych router{name}`"
        return f"Ready in {ready_s:.1f} s: {config.shared.model.name} on {pools}\n{start}\n\n{commands}"
    door = _door(config, status.routers[0])
    key = ["", "Clients need the API key: export DIPTYCH_API_KEY=..."] if door.has_key else []
    return "\n".join(
        [
            f"Ready in {ready_s:.1f} s: {door.model} on {pools}",
            f"  HTTP {door.base_url}    gRPC {door.target}",
            *key,
            "",
            "# curl",
            _curl(door),
            "",
            "# Python, openai",
            _openai(door),
            "",
            "# Python, gRPC",
            _grpc(door),
            "",
            commands,
        ]
    )


def _door(config: ClusterConfig, router: RouterStatus) -> _Door:
    # A wildcard address is where a server listens, not where a client calls.
    host = "127.0.0.1" if router.host in (None, *WILDCARD_HOSTS, *LOOPBACK_HOSTS) else router.host
    scheme = "https" if config.router.http_tls else "http"
    return _Door(
        base_url=f"{scheme}://{host}:{router.http_port}/v1",
        target=f"{host}:{router.grpc_port}",
        model=config.shared.model.name,
        is_chat=_has_chat_template(Path(config.shared.model.model)),
        has_key=config.router.api_key is not None or config.router.api_keys_file is not None,
        has_grpc_tls=config.router.grpc_tls is not None,
    )


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists() or (folder / "chat_template.json").exists():
        return True
    if (model := read_gguf(folder)) is not None and "tokenizer.chat_template" in model.metadata:
        return True
    try:
        return "chat_template" in json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _curl(door: _Door) -> str:
    body: dict[str, object] = {"model": door.model, "max_tokens": MAX_TOKENS}
    prompt = {"messages": [{"role": "user", "content": QUESTION}]} if door.is_chat else {"prompt": QUESTION}
    path = "chat/completions" if door.is_chat else "completions"
    key = ' -H "Authorization: Bearer $DIPTYCH_API_KEY"' if door.has_key else ""
    data = shlex.quote(json.dumps(body | prompt))
    return f"curl {door.base_url}/{path} -H 'Content-Type: application/json'{key} -d {data}"


def _openai(door: _Door) -> str:
    key = 'os.environ["DIPTYCH_API_KEY"]' if door.has_key else '"none"'
    if door.is_chat:
        ask = f'chat.completions.create(model="{door.model}", max_tokens={MAX_TOKENS}, stream=True, messages=messages)'
        prompt, text = f'messages = [{{"role": "user", "content": "{QUESTION}"}}]', "delta.content"
    else:
        ask = f'completions.create(model="{door.model}", max_tokens={MAX_TOKENS}, stream=True, prompt=prompt)'
        prompt, text = f'prompt = "{QUESTION}"', "text"
    return "\n".join(
        [
            *(["import os"] if door.has_key else []),
            "from openai import OpenAI",
            f'client = OpenAI(base_url="{door.base_url}", api_key={key})',
            prompt,
            f"for chunk in client.{ask}:",
            f'    print(chunk.choices[0].{text} or "", end="", flush=True)',
            "print()",
        ]
    )


def _grpc(door: _Door) -> str:
    options = ""
    if door.has_key:
        options += ', api_key=os.environ["DIPTYCH_API_KEY"]'
    if door.has_grpc_tls:
        options += ", tls=True"
    call = "chat_stream(messages" if door.is_chat else "stream(prompt"
    prompt = f'messages = [{{"role": "user", "content": "{QUESTION}"}}]' if door.is_chat else f'prompt = "{QUESTION}"'
    return "\n".join(
        [
            *(["import os"] if door.has_key else []),
            "import diptych",
            prompt,
            f'with diptych.Client("{door.target}"{options}) as client:',
            f"    for text in client.{call}, max_tokens={MAX_TOKENS}):",
            '        print(text, end="", flush=True)',
            "print()",
        ]
    )


def _example_scale(status: ClusterStatus) -> str:
    pool = next(p for p in reversed(status.pools) if p.target)
    return f"{pool.name}={pool.target + 1}"
