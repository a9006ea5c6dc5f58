"""An engine computes the beginning of a prompt for another, which pulls it meanwhile and computes the rest."""

from dataclasses import replace

import pytest

from diptych.workers.common.errors import DeadlineExceeded, InvalidRequest, RequestAborted
from diptych.workers.common.request import Request
from diptych.workers.engine.engine import Engine
from diptych.workers.handoff.types import HandoffOpened
from diptych.workers.testing.fake_runner import fake_output

from ...support.engines import HANDOFF, Move, assert_clean, make, run, tokens
from ...support.sequences import make_request

PROMPT = list(range(1, 31))
MOVE_AT = 20  # five blocks of four
SOURCE, SINK = "0/1", "0/2"


def beginning(num_tokens: int = MOVE_AT) -> Request:
    return replace(make_request(PROMPT[:num_tokens], 1), is_prefix=True)


def begin(source: Engine, sink: Engine, max_tokens: int = 9) -> Move:
    source.submit(SOURCE, beginning(), [], handoff_id=HANDOFF)
    sink.submit(SINK, make_request(PROMPT, max_tokens), [], prefix=True)
    return Move(source, sink, SINK, opened=HandoffOpened(HANDOFF, None, MOVE_AT, is_live=False))


@pytest.mark.parametrize("chunk", [4, 6, 8, 64])
@pytest.mark.parametrize("is_cached", [False, True])
def test_the_beginning_is_pulled_while_it_is_computed_and_no_token_is_sampled(chunk: int, is_cached: bool) -> None:
    source, sink = make(max_batch_tokens=chunk), make(max_batch_tokens=7)
    if is_cached:
        source.submit("9/9", make_request(PROMPT, 1), [])
        run(source)
    move = begin(source, sink)
    num_rest = len(PROMPT) - MOVE_AT
    computed: list[int] = []
    while move.sealed is None:
        output = source.step()
        assert not output.tokens and not output.failures
        computed.append(source.check_integrity().load.num_prefill_tokens)
        move.hear([output])
        move.read()
    assert move.sealed.output_token_ids == () and move.sealed.num_computed == MOVE_AT
    assert len(move.segments) > 1 or chunk == 64
    if is_cached:  # the last block is computed again
        assert computed[-1] - len(PROMPT) == 4
    assert not source.scheduler.has_work
    assert sink.check_integrity().load.num_waiting_tokens == num_rest
    move.commit()
    assert sink.check_integrity().load.num_waiting_tokens == num_rest
    events = tokens(run(sink), SINK)
    assert [e.token_id for e in events] == fake_output(PROMPT, 9)
    load = sink.check_integrity().load
    assert (load.num_prefill_tokens, load.num_waiting_tokens) == (num_rest, 0)
    assert_clean(source)
    assert_clean(sink)
    run(source)
    source.submit("9/8", make_request(PROMPT, 3), [])  # what was computed is cached
    assert tokens(run(source), "9/8")[0].num_cached == (28 if is_cached else MOVE_AT)


def test_another_sink_takes_what_the_first_left() -> None:
    source, first, second = make(max_batch_tokens=8), make(), make()
    left = begin(source, first)
    left.hear([source.step()])
    left.read()
    first.abort(SINK)
    first.fail_import(SINK, quarantine=False)
    second.submit(SINK, make_request(PROMPT, 9), [], prefix=True)
    move = Move(source, second, SINK, opened=left.opened, segments=left.segments)
    move.hear(run(source))
    move.commit()
    assert [e.token_id for e in tokens(run(second), SINK)] == fake_output(PROMPT, 9)
    for engine in (source, first, second):
        run(engine)
        assert_clean(engine)


@pytest.mark.parametrize("end", ["abort", "lease", "deadline"])
def test_without_its_source_the_sink_computes_all(end: str) -> None:
    source, sink = make(max_batch_tokens=8), make()
    move = begin(source, sink)
    move.hear([source.step()])
    move.read()
    if end == "abort":
        source.abort(SOURCE)
    elif end == "lease":
        source.end_lease(HANDOFF)
    else:
        source._clock.now += 1e6  # type: ignore[attr-defined]
    output = source.step()
    move.hear([output])
    assert move.sealed is None
    ended = {"abort": RequestAborted, "lease": type(None), "deadline": DeadlineExceeded}  # who let go is not told
    assert type(move.over) is ended[end]
    assert [type(f.error).__name__ for f in output.failures] == {
        "abort": [],
        "lease": ["LeaseLost"],
        "deadline": ["DeadlineExceeded"],
    }[end]
    source.end_lease(HANDOFF)
    sink.fail_import(SINK, quarantine=False)
    assert [e.token_id for e in tokens(run(sink), SINK)] == fake_output(PROMPT, 9)
    run(source)
    assert_clean(source)
    assert_clean(sink)


def test_a_sealed_beginning_is_dropped_when_its_router_aborts_it() -> None:
    source = make()
    move = begin(source, make())
    move.hear(run(source))
    assert move.sealed is not None
    source.abort(SOURCE)
    move.hear([source.step()])
    assert isinstance(move.over, RequestAborted)
    source.end_lease(HANDOFF)
    assert_clean(source)


@pytest.mark.parametrize(
    ("request_", "outputs", "handoff_id"),
    [
        (beginning(MOVE_AT + 1), [], HANDOFF),
        (beginning(), [], None),
        (replace(beginning(), sampling=replace(beginning().sampling, prompt_logprobs=1)), [], HANDOFF),
    ],
)
def test_what_cannot_be_a_beginning_is_refused(request_: Request, outputs: list[int], handoff_id: str | None) -> None:
    engine = make()
    engine.submit(SOURCE, request_, outputs, handoff_id=handoff_id)
    (failure,) = engine.step().failures
    assert isinstance(failure.error, InvalidRequest) and "prefix" in failure.error.message
    assert_clean(engine)
