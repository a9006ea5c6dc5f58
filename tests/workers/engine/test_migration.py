"""Running sequences move between engines: every token once, and every block accounted for."""

import pytest

from diptych.workers.common.errors import HandoffError, OutOfBlocks, RequestAborted, StepFailed
from diptych.workers.common.request import FinishReason
from diptych.workers.core.live_handoff import offered_tokens, slack_tokens
from diptych.workers.engine.engine import Engine
from diptych.workers.handoff.types import HandoffHeld
from diptych.workers.testing.fake_runner import fake_output

from ...support.engines import HANDOFF, Move, assert_clean, make, run, tokens
from ...support.sequences import make_request

BLOCK = 4  # tokens
PROMPT = [1, 2, 3, 5, 7, 11]  # no sum on its way is a multiple of 1000: only max_tokens ends it
SLACK = slack_tokens(len(PROMPT), BLOCK)


def decode(
    engine: Engine, num_steps: int, prompt: list[int] = PROMPT, max_tokens: int = 40, key: str = "0/1"
) -> list[int]:
    """Submit a request and run this many steps; return its tokens so far."""
    engine.submit(key, make_request(prompt, max_tokens), [])
    return [e.token_id for e in tokens([engine.step() for _ in range(num_steps)], key)]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_steps_on", [0, 1, 4, 7])
@pytest.mark.parametrize("num_before", [1, 2, 3, 4, 5])
def test_a_running_sequence_moves_and_no_token_differs(num_before: int, num_steps_on: int, prefix_cache: bool) -> None:
    source, sink = make(prefix_cache=prefix_cache), make(prefix_cache=prefix_cache)
    expected = fake_output(PROMPT, 40)
    made = decode(source, num_before)
    source.outgoing.offer("0/1", HANDOFF)
    sink.submit("0/1", make_request(PROMPT, 40), made, importing=True)
    move = Move(source, sink)
    for _ in range(num_steps_on):
        made += [e.token_id for e in tokens(move.hear([source.step()]), "0/1")]
        move.read()
    source.caught_up(HANDOFF)
    source.caught_up(HANDOFF)  # a sink reports this with every renewal
    assert tokens(move.hear([source.step()]), "0/1") == []
    assert not source.scheduler.has_work
    assert move.opened is not None and move.opened.is_live and move.sealed is not None and move.sealed.is_live
    assert list(move.sealed.output_token_ids) == made == expected[: len(made)]
    assert move.sealed.num_computed == len(PROMPT) + len(made) - 1 <= move.opened.num_tokens
    move.commit()
    events = tokens(run(sink), "0/1")
    assert [(e.position, e.token_id) for e in events] == list(enumerate(expected))[len(made) :]
    assert [e.num_cached for e in events] == [0] + [None] * (len(events) - 1)
    assert events[-1].finish is FinishReason.LENGTH
    assert source.check_integrity().load.num_migrated_out == 1
    assert_clean(source)
    assert_clean(sink)


def test_it_waits_when_it_has_made_what_was_offered() -> None:
    source, sink = make(), make()
    made = decode(source, 3)
    source.outgoing.offer("0/1", HANDOFF)
    move = Move(source, sink)
    made += [e.token_id for e in tokens(move.hear([source.step() for _ in range(50)]), "0/1")]
    assert move.opened is not None and move.sealed is None
    assert move.opened.num_tokens == len(PROMPT) + 3 + SLACK == len(PROMPT) + len(made) - 1
    # Another sink may come when the router has all tokens, of which the last has no KV yet.
    sink.submit("0/1", make_request(PROMPT, 40), made, importing=True)
    move.read()
    source.caught_up(HANDOFF)
    move.hear([source.step()])
    move.commit()
    assert made + [e.token_id for e in tokens(run(sink), "0/1")] == fake_output(PROMPT, 40)
    assert_clean(source)
    assert_clean(sink)


def test_a_long_sequence_is_offered_with_more_to_make() -> None:
    source = make()
    decode(source, 3, prompt=[1] * 33 * BLOCK, max_tokens=90)
    source.outgoing.offer("0/1", HANDOFF)
    move = Move(source, make())
    move.hear([source.step()])
    assert move.opened is not None
    assert move.opened.num_tokens == offered_tokens(33 * BLOCK + 3, 87, BLOCK) == 33 * BLOCK + 3 + SLACK + 2 * BLOCK
    source.abort("0/1")
    source.end_lease(HANDOFF)
    assert_clean(source)


def test_it_runs_on_when_what_it_waited_for_does_not_come() -> None:
    source = make()
    made = decode(source, 3)
    source.outgoing.offer("0/1", HANDOFF)
    outputs = [source.step() for _ in range(50)]
    assert [e for o in outputs for e in o.handoffs if isinstance(e, HandoffHeld)] == [HandoffHeld(HANDOFF)]
    made += [e.token_id for e in tokens(outputs, "0/1")]
    assert len(made) == 3 + SLACK + 1 < 40
    source.end_lease(HANDOFF)
    assert made + [e.token_id for e in tokens(run(source), "0/1")] == fake_output(PROMPT, 40)
    assert_clean(source)


def test_a_sequence_that_ends_first_ends_its_handoff() -> None:
    source = make()
    decode(source, 3, max_tokens=9)
    source.outgoing.offer("0/1", HANDOFF)
    move = Move(source, make())
    events = tokens(move.hear(run(source)), "0/1")
    assert events[-1].finish is FinishReason.LENGTH
    assert move.opened is not None and move.opened.num_tokens == len(PROMPT) + 9  # it cannot need more
    assert move.sealed is None and isinstance(move.over, RequestAborted)
    source.caught_up(HANDOFF)
    source.end_lease(HANDOFF)
    source.caught_up(HANDOFF)
    assert_clean(source)


def test_without_a_sink_it_runs_on_and_may_be_offered_again() -> None:
    source, sink = make(), make()
    made = decode(source, 2)
    for handoff_id in ("a", "b", "c"):
        source.outgoing.offer("0/1", handoff_id)
        made += [e.token_id for e in tokens([source.step()], "0/1")]
        assert source.check_integrity().load.num_leased_blocks > 0
        source.end_lease(handoff_id)
        assert source.check_integrity().load.num_leased_blocks == 0
    source.outgoing.offer("0/1", "another")
    sink.submit("0/1", make_request(PROMPT, 40), made, importing=True)
    move = Move(source, sink, handoff_id="another")
    made += [e.token_id for e in tokens(move.hear([source.step()]), "0/1")]
    source.caught_up("another")
    move.hear([source.step()])
    source.end_lease("a")  # it ended long ago
    move.commit()
    assert made + [e.token_id for e in tokens(run(sink), "0/1")] == fake_output(PROMPT, 40)
    assert_clean(source)
    assert_clean(sink)


def test_what_does_not_decode_here_is_refused_and_nothing_else_changes() -> None:
    source = make(max_batch_tokens=4)
    source.submit("0/1", make_request(PROMPT, 20), [])
    source.submit("0/2", make_request(PROMPT, 20), [], importing=True)
    source.step()  # a chunk of the prompt
    for number, (key, why) in enumerate(
        [("0/1", "not decoding"), ("0/2", "not decoding"), ("0/3", "not here"), ("0/4", "not here")]
    ):
        source.outgoing.offer(key, f"bad-{number}")
        move = Move(source, make(), handoff_id=f"bad-{number}")
        move.hear([source.step()])
        assert isinstance(move.over, HandoffError) and why in move.over.message and move.opened is None
    source.outgoing.offer("0/1", HANDOFF)
    for handoff_id, why in ((HANDOFF, "single-use"), ("other", "already")):
        source.outgoing.offer("0/1", handoff_id)
        assert why in source.outgoing.events[-1].error.message  # type: ignore[union-attr]
    source.end_lease(HANDOFF)
    source.abort("0/2")
    source.fail_import("0/2", quarantine=False)
    run(source)
    source.outgoing.offer("0/1", HANDOFF)  # it has ended
    assert "not here" in source.outgoing.events[-1].error.message  # type: ignore[union-attr]
    assert_clean(source)


@pytest.mark.parametrize("sealed", [False, True])
def test_an_abort_ends_the_handoff(sealed: bool) -> None:
    source = make()
    decode(source, 4)
    source.outgoing.offer("0/1", HANDOFF)
    if sealed:
        source.caught_up(HANDOFF)
    source.abort("0/1")
    move = Move(source, make())
    move.hear([source.step()])
    assert isinstance(move.over, RequestAborted) and (move.sealed is not None) == sealed
    source.end_lease(HANDOFF)
    assert_clean(source)


def test_a_failed_step_ends_the_handoff_of_what_it_fails() -> None:
    source = make()
    decode(source, 4)
    source.outgoing.offer("0/1", HANDOFF)
    source.step_failed(RuntimeError("a kernel"))
    move = Move(source, make())
    move.hear([source.step()])
    assert isinstance(move.over, StepFailed)
    source.end_lease(HANDOFF)
    assert_clean(source)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_preempted_sequence_ends_its_handoff_and_runs_on(prefix_cache: bool) -> None:
    """Everything that runs is on offer, and the blocks are gone."""
    source = make(num_blocks=7, prefix_cache=prefix_cache)
    prompts = {f"0/{i}": [i + 1] * 7 for i in range(2)}
    for key, prompt in prompts.items():
        source.submit(key, make_request(prompt, 20), [])
    got = {key: [t.token_id for t in tokens([output], key)] for output in [source.step()] for key in prompts}
    moves = {key: Move(source, make(), handoff_id=key) for key in prompts}
    for key in prompts:
        source.outgoing.offer(key, key)
    while source.scheduler.has_work:
        output = source.step()
        assert source.check_integrity().num_unaccounted_blocks == 0
        for key, move in moves.items():
            got[key] += [t.token_id for t in tokens(move.hear([output]), key)]
            if move.over is not None or move.sealed is not None:
                source.end_lease(key)
        if source.scheduler.num_preemptions:
            source.caught_up("0/0")
    first, second = moves.values()
    assert first.over is None and first.sealed is not None
    assert isinstance(second.over, OutOfBlocks) and second.sealed is None
    expected = {key: fake_output(prompt, 20) for key, prompt in prompts.items()}
    assert got["0/0"] == list(first.sealed.output_token_ids) == expected["0/0"][: len(got["0/0"])]
    assert got["0/1"] == expected["0/1"]
    assert source.scheduler.num_preemptions == 1
    assert_clean(source)
