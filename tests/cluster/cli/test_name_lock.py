"""One process a name, whatever the order in which two of them start and end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.cluster.cli.name_lock import hold
from diptych.workers.common.errors import ConfigError

# Takes the name, prints whether it succeeded, and holds it until its input ends.
TAKE = """
import sys
from diptych.cluster.cli.name_lock import hold
from diptych.workers.common.errors import ConfigError
try:
    with hold("default"):
        print("mine", flush=True)
        sys.stdin.read()
except ConfigError as e:
    print(e.message, flush=True)
"""
NUM_RACERS = 4


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def take() -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", TAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def end(process: "subprocess.Popen[str]") -> None:
    assert process.stdin and process.stdout
    process.stdin.close()
    process.stdout.close()
    process.wait(60)


def test_of_those_that_race_one_has_the_name_and_the_others_say_who(home: Path) -> None:
    racers = [take() for _ in range(NUM_RACERS)]
    said = {racer.pid: racer.stdout.readline() for racer in racers if racer.stdout}
    winners = [pid for pid, words in said.items() if words == "mine\n"]
    assert len(winners) == 1
    for words in said.values():
        assert words == "mine\n" or (f"process {winners[0]}" in words or "process that starts now" in words)
        assert words == "mine\n" or ("already runs" in words and "`diptych stop --name default`" in words)
    for racer in racers:
        end(racer)
    assert not list(home.iterdir())


def test_a_name_is_free_after_its_holder_has_ended_or_was_killed(home: Path) -> None:
    killed = take()
    assert killed.stdout and killed.stdout.readline() == "mine\n"
    with pytest.raises(ConfigError, match=f"process {killed.pid}"), hold("default"):
        pass
    with hold("another"):
        pass
    killed.kill()
    killed.wait(60)
    end(killed)
    for _ in range(2):
        with hold("default"):
            assert (home / "default.lock").read_text() == str(os.getpid())
    assert not list(home.iterdir())
