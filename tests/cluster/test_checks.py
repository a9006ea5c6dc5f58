"""What is found wrong before anything starts."""

import socket
from pathlib import Path

import pytest

from diptych.cluster import checks
from diptych.cluster.checks import check_model, check_ports, check_tls, resolve_model
from diptych.cluster.config_file import build
from diptych.workers.errors import CheckpointError, ConfigError, PortInUse


def test_the_shipped_model_is_fine() -> None:
    check_model(Path(resolve_model("tiny")))


def test_a_folder_that_is_named_tiny_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model("./tiny") == str(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "no config.json"), ("{", "cannot be read"), ("[]", "no JSON object")],
)
def test_a_folder_without_a_readable_config_is_no_checkpoint(
    tmp_path: Path, content: str | None, expected: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=expected):
        check_model(tmp_path)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="is a file"):
        check_model(tmp_path / "model.safetensors")


def test_a_port_in_use_names_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = build({"model": "m", "router": {"grpc_port": port, "http_port": 0}})
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 is in use. Choose another with --grpc-port"):
            check_ports(config)
    check_ports(config)


def test_an_address_of_another_machine() -> None:
    config = build({"model": "m", "router": {"host": "192.0.2.1", "api_key": "long enough"}})
    with pytest.raises(ConfigError, match=r"cannot listen on 192.0.2.1: .* Is it an address of this machine\?"):
        check_ports(config)


def test_a_dashboard_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'ray\[default\]'"):
        checks.check_dashboard(build({"model": "m", "dashboard": True}))
    checks.check_dashboard(build({"model": "m"}))


def test_a_missing_key_file_is_named() -> None:
    config = build({"model": "m", "router": {"grpc_tls": {"cert": __file__, "key": "/absent.pem"}}})
    with pytest.raises(ConfigError, match=r"router.grpc_tls.key: cannot read /absent.pem: No such file"):
        check_tls(config)
