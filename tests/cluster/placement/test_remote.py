"""What a command to a running cluster prints."""

import pytest

from diptych.cluster.placement import remote


class Talkative:
    """A session whose Ray prints among the command's output, as a driver's listener for errors does."""

    def __init__(self, name: str) -> None:
        print(f"(raylet) {name}: a node is missing")

    def close(self) -> None:
        print("(raylet) a last word")


def test_what_ray_prints_is_not_among_the_commands_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "_session", Talkative)
    monkeypatch.setattr(remote, "_find", lambda name, wait_s: name)
    with remote.connected("joined") as supervisor:
        print("(raylet) meanwhile")
    print(f"the answer of {supervisor}")
    printed = capsys.readouterr()
    assert printed.out == "the answer of joined\n"
    assert printed.err.count("(raylet)") == 3
