"""What a command to a running cluster prints."""

import platform
from pathlib import Path

import pytest

from diptych.cluster.common import address_file
from diptych.cluster.common.address_file import ClusterAddress
from diptych.cluster.placement import remote
from diptych.workers.common.errors import Unavailable


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


@pytest.mark.parametrize(
    ("is_local", "node", "said"),
    [
        (True, platform.node(), "'mine' has ended"),
        (True, "elsewhere", "'mine' was started on elsewhere: give the command there"),
        (False, platform.node(), "try again once it answers"),
    ],
)
def test_the_address_of_a_cluster_that_may_run_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_local: bool, node: str, said: str
) -> None:
    """Of a Ray of its own nothing is left when its `diptych serve` has ended, which only its machine knows; another one
    outlives that."""
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path))
    ended = ClusterAddress("mine", "127.0.0.1:1", None, is_local, pid=1 << 30, started=0.0, node=node)
    address_file.write(ended)

    def join(address: str, token_path: Path | None, *, is_local: bool = False) -> None:
        raise Unavailable(f"no Ray answers at {address}")

    monkeypatch.setattr(remote, "join", join)
    with pytest.raises(Unavailable, match=said), remote.connected("mine"):
        pass
    assert address_file.read("mine") == (None if "has ended" in said else ended)
