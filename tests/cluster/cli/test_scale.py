"""`diptych scale` while another one runs."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from diptych.cluster.cli.main import app
from diptych.cluster.control.status import ClusterStatus, PoolStatus
from diptych.cluster.placement import remote

POOL = PoolStatus("decode", 1, num_ready=1, num_starting=0, num_draining=0, min_replicas=1, max_replicas=1)


@pytest.mark.parametrize("waits", [(), ("--timeout", "0")])
def test_a_scale_whose_target_another_one_has_changed_says_so(
    monkeypatch: pytest.MonkeyPatch, waits: tuple[str, ...]
) -> None:
    """The pool has the size that the other command wanted, not what this one was asked for."""
    status = ClusterStatus("default", "tiny", 1, (POOL,), (), ())
    supervisor = SimpleNamespace(scale=lambda replicas: None, status=lambda: status)
    monkeypatch.setattr(remote, "connected", lambda name: nullcontext(supervisor))
    result = CliRunner().invoke(app, ["scale", "decode=3", *waits])
    assert (result.exit_code, result.stdout) == (3, "decode: 1 of 1 ready\n")
    assert "the target of decode has been changed since" in result.stderr
    assert CliRunner().invoke(app, ["scale", "decode=1", *waits]).exit_code == 0
