"""Flags of `diptych endpoint-picker`. tests/e2e/test_gateway.py runs it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.cluster.cli.main import app
from diptych.cluster.picker import command, serving
from diptych.cluster.picker.server import PickerConfig
from diptych.workers.common.tls import make_identity

NEEDED = ("--router", "routers:8000")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PickerConfig, tuple[object, ...]]]:
    """What was to be served, in place of serving it."""
    found: list[tuple[PickerConfig, tuple[object, ...]]] = []

    async def serve(config: PickerConfig, *where: object) -> None:
        found.append((config, where))

    monkeypatch.setattr(serving, "_serve", serve)
    monkeypatch.setattr(command, "configure_logs", lambda *_: None)
    for name in command.KEYS:
        monkeypatch.delenv(name, raising=False)
    return found


def run(*args: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["endpoint-picker", *args], env=env)
    return found.exit_code, found.output


Started = Sequence[tuple[PickerConfig, tuple[object, ...]]]


def test_flags_say_what_is_served(started: Started, tmp_path: Path) -> None:
    made = make_identity("test")
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_bytes(getattr(made, name))
    (tmp_path / "metrics-key").write_text("secret\n")
    assert run(*NEEDED) == (0, "")
    config, where = started[-1]
    assert where == ("127.0.0.1", 9002, 9003, 9090), "loopback unless told otherwise, and the extension's ports"
    assert (config.routers, config.num_fallbacks, config.has_tls, config.certificate) == (
        ("routers:8000",),
        0,
        True,
        None,
    )
    assert (config.access.key, config.access.tls) == (None, None)
    flags = ["--router", "10.0.0.1:8000", "--host", "::", "--port", "1", "--health-port", "2", "--metrics-port", "3"]
    flags += ["--fallbacks", "2", "--objective", "batch=-10", "--objective", "chat=5", "--model-rewrite", "a=b"]
    flags += [
        "--key-file",
        str(tmp_path / "metrics-key"),
        "--router-ca",
        str(tmp_path / "ca"),
        "--router-name",
        "diptych",
    ]
    flags += ["--tls-cert", str(tmp_path / "cert"), "--tls-key", str(tmp_path / "key")]
    assert run(*NEEDED, *flags) == (0, "")
    config, where = started[-1]
    assert where == ("::", 1, 2, 3)
    assert config.routers == ("routers:8000", "10.0.0.1:8000")
    assert (config.num_fallbacks, config.rules.objectives) == (2, {"batch": -10, "chat": 5})
    assert (config.rules.rewrites, config.certificate) == ({"a": "b"}, (made.cert, made.key))
    assert (config.access.key, config.access.name, config.access.tls is None) == ("secret", "diptych", False)
    assert not config.rules.reads_rewrite_header, "clients can set it"
    assert run(*NEEDED, "--no-tls", "--drain", "3", "--model-rewrite-header") == (0, "")
    assert started[-1][0].rules.reads_rewrite_header
    assert (started[-1][0].has_tls, started[-1][0].drain_s) == (False, 3.0)


def test_keys_come_from_the_environment_the_narrower_first(started: Started) -> None:
    assert run(*NEEDED, env={"DIPTYCH_API_KEY": "api"}) == (0, "")
    assert started[-1][0].access.key == "api"
    assert run(*NEEDED, env={"DIPTYCH_API_KEY": "api", "DIPTYCH_METRICS_KEY": "metrics"}) == (0, "")
    assert started[-1][0].access.key == "metrics"
    assert "metrics" not in repr(started[-1][0])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--objective", "batch"), "NAME=VALUE"),
        (("--objective", "batch=low"), "whole number"),
        (("--model-rewrite", "=b"), "NAME=VALUE"),
        (("--tls-cert", "cert.pem"), "belong together"),
        (("--tls-cert", "cert.pem", "--tls-key", "key.pem"), "cannot read"),
        (("--router-ca", "ca.pem"), "give a PEM file"),
        (("--router-ca", __file__), "give a PEM file"),
        (("--key-file", "key"), "cannot read"),
    ],
)
def test_wrong_flags_are_told(started: Started, flags: tuple[str, ...], words: str) -> None:
    code, output = run(*NEEDED, *flags)
    assert (code, words in output) == (2, True), output
    assert not started


def test_without_a_router_nothing_starts(started: Started) -> None:
    code, output = run()
    assert code == 2
    assert "--router" in output
    assert not started
