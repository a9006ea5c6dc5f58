"""`ps` shows command lines to every user of a machine: tokens and keys come from a file or the environment."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.cluster.cli import launcher
from diptych.cluster.cli.main import app
from diptych.cluster.common.config import ClusterConfig
from diptych.workers.common.errors import ConfigError
from diptych.workers.server.worker import parse_args

SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIPTYCH_AUTH_TOKEN", "DIPTYCH_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("args", [("--auth-token", SECRET), (f"--auth-token={SECRET}",)])
def test_a_token_on_the_command_line_is_refused(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(["--model", "m", *args])
    assert ended.value.code == 2
    assert "unrecognized arguments: --auth-token" in capsys.readouterr().err


def test_a_token_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{SECRET}\n")
    config = parse_args(["--model", "m", "--auth-token-file", str(tmp_path / "token")])
    assert config.auth_token == SECRET


def test_a_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_args(["--model", "m"]).auth_token is None
    monkeypatch.setenv("DIPTYCH_AUTH_TOKEN", SECRET)
    assert parse_args(["--model", "m"]).auth_token == SECRET


def test_a_file_without_a_token_does_not_open_the_worker(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name, expected in (("empty", "is empty"), ("absent", "cannot read")):
        with pytest.raises(ConfigError, match=expected):
            parse_args(["--model", "m", "--auth-token-file", str(tmp_path / name)])


def test_an_api_key_comes_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ClusterConfig] = []
    monkeypatch.setattr(launcher, "serve", lambda config, console: seen.append(config))
    monkeypatch.setenv("DIPTYCH_API_KEY", "of-the-environment")
    (tmp_path / "key").write_text(f"{SECRET}\n")
    assert CliRunner().invoke(app, ["serve", "tiny", "--api-key-file", str(tmp_path / "key")]).exit_code == 0
    assert seen[0].router.api_key == SECRET


def test_a_file_without_an_api_key_does_not_open_the_front_door(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name, expected in (("empty", "is empty"), ("absent", "cannot read")):
        result = CliRunner().invoke(app, ["serve", "tiny", "--api-key-file", str(tmp_path / name)])
        assert (result.exit_code, expected in result.stderr) == (2, True)
