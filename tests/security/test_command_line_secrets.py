"""What `ps` shows to every user of a machine holds no secret: a worker's token comes from a file or the environment."""

from pathlib import Path

import pytest

from diptych.workers.errors import ConfigError
from diptych.workers.worker import parse_args

SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIPTYCH_AUTH_TOKEN", raising=False)


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
