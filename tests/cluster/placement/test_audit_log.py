"""Lines of the audit log: who asked what of a cluster, when, and what came of it."""

import json
import logging
from datetime import UTC, datetime

import pytest

from diptych.cluster.placement.audit_log import MAX_WHO_CHARS, audited, caller
from diptych.workers.common.errors import ConfigError


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    found = [record.getMessage() for record in caplog.records if record.name == "diptych.audit"]
    assert not [line for line in found if "\n" in line]
    return [json.loads(line) for line in found]


def test_every_call_is_one_line_with_its_result(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "diptych.audit")
    with audited("ann@host", "scale", {"decode": 3}):
        pass
    with pytest.raises(ConfigError), audited("bob\nann@host", "scale", {"decode": -1}):
        raise ConfigError("a pool has 0 workers or more")
    with pytest.raises(ZeroDivisionError), audited("x" * 1000, "stop"):
        raise ZeroDivisionError
    done, refused, failed = lines(caplog)
    assert (done["who"], done["what"], done["with"], done["result"]) == ("ann@host", "scale", {"decode": 3}, "done")
    assert refused["who"] == "bob\nann@host" and refused["result"] == "config_error: a pool has 0 workers or more"
    assert failed["result"] == "failed: ZeroDivisionError" and len(str(failed["who"])) == MAX_WHO_CHARS
    assert abs((datetime.now(UTC) - datetime.fromisoformat(str(done["at"]))).total_seconds()) < 600


def test_a_caller_is_a_user_of_a_machine() -> None:
    user, _, machine = caller().partition("@")
    assert user and machine
