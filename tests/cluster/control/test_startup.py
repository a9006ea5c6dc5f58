"""Messages during a start, and the end of a start."""

from dataclasses import replace

import pytest

from diptych.cluster.control.startup import losses, missing, why_it_fails
from diptych.cluster.control.status import ClusterStatus, PoolStatus, RouterStatus, StartFailure, WorkerStatus
from diptych.workers.common.errors import CheckpointError, Unavailable


def pool(**more: object) -> PoolStatus:
    settings = {"target": 2, "num_ready": 0, "num_starting": 2, "num_draining": 0, "min_replicas": 2, "max_replicas": 2}
    return PoolStatus(name="decode", **{**settings, **more})  # type: ignore[arg-type]


def status(pool: PoolStatus, router: RouterStatus, *workers: WorkerStatus) -> ClusterStatus:
    return ClusterStatus("default", "/m", 1, (pool,), workers, (router,))


def starting(worker_id: str, waiting_for: str = "") -> WorkerStatus:
    return WorkerStatus(worker_id, "decode", "decode", "starting", 1.0, waiting_for)


STARTING = RouterStatus("router-1", "starting")
READY = RouterStatus("router-1", "ready")


def test_a_start_goes_on_while_it_may_succeed() -> None:
    now = status(pool(num_failures=2, last_error="killed"), replace(STARTING, num_failures=2))
    assert why_it_fails(now) is None


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (
            replace(status(pool(), STARTING), failure=StartFailure("CheckpointError", "no tokenizer")),
            CheckpointError("no tokenizer"),
        ),
        (
            status(pool(num_failures=3, last_error="decode-3: killed"), READY),
            Unavailable("the decode workers do not start: decode-3: killed"),
        ),
        (
            status(pool(), replace(STARTING, num_failures=3, last_error="killed")),
            Unavailable("router-1 does not start: killed"),
        ),
    ],
)
def test_a_process_that_cannot_start_ends_the_start_with_its_error(now: ClusterStatus, expected: Exception) -> None:
    error = why_it_fails(now)
    assert (type(error), str(error)) == (type(expected), str(expected))


def test_a_start_says_what_it_waits_for() -> None:
    now = status(pool(), STARTING, starting("decode-1", "a node with 8 CPU"), starting("decode-2"))
    assert missing(now) == (
        "0 of 2 decode workers ready; router-1 starts; decode-1 waits for a node with 8 CPU; decode-2 loads the model"
    )
    placed = replace(STARTING, waiting_for="a node with 2 CPU")
    assert missing(status(pool(target=1, num_ready=1), placed)) == (
        "1 of 1 decode worker ready; router-1 waits for a node with 2 CPU"
    )


def test_each_loss_is_said_once() -> None:
    before = status(pool(), STARTING)
    now = status(
        pool(num_failures=1, last_error="decode-1: killed"), replace(STARTING, last_error="killed", num_failures=1)
    )
    assert losses(None, now) == losses(before, now) == ["decode: lost decode-1: killed", "lost router-1: killed"]
    assert losses(now, now) == []
