"""Folders and files that a user may not use, or names wrongly: one line with a remedy, and no traceback."""

import errno
import os
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from diptych.cluster.cli import main as cli
from diptych.cluster.cli.main import app
from diptych.cluster.cli.name_lock import hold
from diptych.cluster.common import address_file
from diptych.cluster.common.config import ClusterConfig
from diptych.workers.common.errors import ConfigError


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "DIPTYCH_API_KEY", "DIPTYCH_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[ClusterConfig]:
    """The settings that `serve` would have run with."""
    from diptych.cluster.cli import launcher

    seen: list[ClusterConfig] = []
    monkeypatch.setattr(launcher, "serve", lambda config, console: seen.append(config))
    return seen


def refused(*args: str) -> str:
    """What the command says: a line."""
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


def called(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def test_a_home_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of another user, or on a disk that is mounted to be read."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path / "file" / "home"))
    said = refused("serve", "tiny", "--http-port", "0", "--grpc-port", "0")
    assert f"cannot write {tmp_path}/file/home/default.lock" in said
    assert "Set DIPTYCH_HOME to a folder in which you may write" in said
    assert "cannot use" in refused("status"), "what is read is no folder"


def test_a_user_without_a_home_is_told_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    with pytest.raises(ConfigError, match="no home folder: set DIPTYCH_HOME"), hold("default"):
        pass


def test_a_relative_home_is_the_same_for_every_process(
    settings: list[ClusterConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's processes run in folders of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DIPTYCH_HOME", "here")
    assert called("serve", "tiny").exit_code == 0 and settings
    assert os.environ["DIPTYCH_HOME"] == str(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DIPTYCH_HOME", "~/there")
    assert called("serve", "tiny").exit_code == 0
    assert os.environ["DIPTYCH_HOME"] == str(tmp_path / "there")
    monkeypatch.setenv("DIPTYCH_HOME", "~nobody-of-that-name/x")
    assert "DIPTYCH_HOME: ~nobody-of-that-name/x" in refused("serve", "tiny")


def test_a_model_in_the_home_of_nobody_is_named() -> None:
    assert "write the whole path" in refused("serve", "~nobody-of-that-name/model")


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC])
def test_a_file_that_may_not_be_used_is_named(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(name: str) -> None:
        raise OSError(number, os.strerror(number), f"/x/{name}.json")

    monkeypatch.setattr(address_file, "read", fail)
    said = refused("status")
    assert "/x/default.json" in said and os.strerror(number) in said


def test_what_no_file_is_to_blame_for_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(address_file, "read", fail)
    assert isinstance(called("status").exception, OSError)


def test_a_cluster_of_another_user_is_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path))
    this = psutil.Process()
    started = address_file.start_of(this)
    address_file.write(address_file.ClusterAddress("default", "127.0.0.1:1", None, True, this.pid, started))

    def denied(self: psutil.Process, number: int) -> None:
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "send_signal", denied)
    assert f"process {this.pid} is another user's" in refused("stop")


@pytest.mark.parametrize("variable", ["DIPTYCH_API_KEY", "DIPTYCH_METRICS_KEY"])
def test_a_key_loses_the_line_end_of_its_file(
    settings: list[ClusterConfig], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """`kubectl create secret --from-file` and `echo ... | base64` keep it, and no client can send it."""
    monkeypatch.setenv(variable, "sesame-sesame\n")
    assert called("serve", "tiny").exit_code == 0
    router = settings[0].router
    assert "sesame-sesame" in (router.api_key, router.metrics_key)
    monkeypatch.setenv(variable, " \n")
    assert "at least 8 characters" in refused("serve", "tiny")


def test_main_has_no_command_that_hides_its_errors() -> None:
    """Each command reports its errors alike."""
    assert all(hasattr(command.callback, "__wrapped__") for command in cli.app.registered_commands)


def test_other_files_in_a_home_are_not_taken_for_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path))
    for name, text in {"list": "[1]", "object": '{"a": 1}', "cut": "{", "number": "1"}.items():
        (tmp_path / f"{name}.json").write_text(text)
    assert address_file.names() == []
