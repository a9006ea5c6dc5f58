"""A request knows which worker made each of its tokens, whatever happened to its worker requests."""

from diptych.cluster.routing.actions import WorkerToken
from diptych.workers.common.request import FinishReason

from ...support.state_harness import KV_GONE, LOST, StateHarness, split

Origins = list[tuple[int, str]]


def token(harness: StateHarness, handle: int, position: int, worker: str, finish: FinishReason | None = None) -> None:
    harness.log = list(harness.state.token(handle, WorkerToken(position, 7, finish, worker=worker)))


def origins(harness: StateHarness) -> Origins:
    return list(harness.state.output.notes.origins)


def test_the_first_token_is_the_prefill_workers_and_the_others_the_decode_workers() -> None:
    harness = split()
    token(harness, 1, 0, "P")
    token(harness, 2, 1, "D")
    token(harness, 2, 2, "D")
    assert origins(harness) == [(0, "P"), (1, "D")]
    delta = harness.state.output.take(harness.state.finish)
    assert delta is not None and list(delta.origins) == [(0, "P"), (1, "D")]


def test_a_token_that_is_held_counts_once_it_has_its_place() -> None:
    harness = split()
    token(harness, 2, 1, "D")
    assert origins(harness) == []
    token(harness, 1, 0, "P")
    assert origins(harness) == [(0, "P"), (1, "D")]


def test_tokens_of_a_worker_that_resumes_are_its_own() -> None:
    harness = split()
    token(harness, 1, 0, "P")
    token(harness, 2, 1, "D")
    harness.failed(2, LOST)
    harness.begin(None, "E")
    token(harness, 3, 2, "E")
    assert origins(harness) == [(0, "P"), (1, "D"), (2, "E")]


def migrating() -> StateHarness:
    harness = StateHarness(max_tokens=8)
    harness.begin(None, "A")
    token(harness, 1, 0, "A")
    harness.migrate("B")
    return harness


def test_after_a_migration_tokens_are_its_targets() -> None:
    harness = migrating()
    token(harness, 2, 2, "B")
    token(harness, 1, 1, "A")
    assert origins(harness) == [(0, "A"), (2, "B")]


def test_after_a_failed_migration_tokens_are_still_the_sources() -> None:
    harness = migrating()
    harness.failed(2, KV_GONE, handoff=True)
    token(harness, 1, 1, "A")
    assert origins(harness) == [(0, "A")]


def test_a_token_of_a_target_that_was_lost_then_is_its_own() -> None:
    harness = migrating()
    token(harness, 2, 2, "B")
    harness.failed(2, LOST)
    token(harness, 1, 1, "A")
    harness.begin(None, "C")
    token(harness, 3, 3, "C")
    assert origins(harness) == [(0, "A"), (2, "B"), (3, "C")]


def test_a_repeated_token_changes_nothing() -> None:
    harness = split()
    token(harness, 1, 0, "P")
    token(harness, 1, 0, "P")
    assert origins(harness) == [(0, "P")]
