"""Where only full blocks can be taken over (kv/dtypes.py), tokens are the same: the rest is computed again."""

import pytest

from diptych.workers.common.errors import HandoffError
from diptych.workers.common.timings import PullTimes
from diptych.workers.engine.engine import Engine
from diptych.workers.handoff.types import HandoffSealed, Reservation, Seal
from diptych.workers.testing.fake_runner import fake_output

from ...support.engines import HANDOFF, Move, assert_clean, make, reserve, run, tokens
from ...support.sequences import make_request

SIZE, MAX_TOKENS = 4, 9


def of_whole_blocks() -> Engine:
    engine = make()
    engine.cache.whole_blocks = True
    return engine


def seal_of(event: HandoffSealed, multiple: int = SIZE) -> Seal:
    return Seal(0, event.num_computed, tuple(event.output_token_ids), multiple=multiple)


def taken(source: Engine, sink: Engine, move: Move) -> HandoffSealed:
    """Read all that is announced. What is in the sink's blocks after the full ones is nobody's."""
    move.read()
    assert move.sealed is not None and move.reservation is not None
    for block in move.reservation.block_ids[move.sealed.num_computed // SIZE :]:
        sink._runner._kv[block] = -7
    return move.sealed


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("begins", [False, True])
def test_the_sink_computes_what_follows_the_full_blocks(num_prompt: int, begins: bool) -> None:
    source, sink, prompt = of_whole_blocks(), of_whole_blocks(), list(range(1, num_prompt + 1))
    move, request = Move(source, sink), make_request(prompt, MAX_TOKENS)
    sink.submit(move.key, request, [], importing=True)
    source.submit("0/0", request, [], handoff_id=HANDOFF)
    move.hear(run(source))
    granted = reserve(sink, move.key, num_prompt)
    assert isinstance(granted, Reservation)
    move.reservation = granted
    sealed = taken(source, sink, move)
    assert sealed.num_computed == num_prompt // SIZE * SIZE
    assert sum(len(segment.block_ids) for segment in move.segments) == num_prompt // SIZE
    outputs = []
    if begins:
        sink.begin(move.key, seal_of(sealed))
        outputs += [sink.step() for _ in range(3)]
        assert not any(output.tokens for output in outputs)
    source.end_lease(HANDOFF)
    sink.commit(move.key, seal_of(sealed), PullTimes())
    outputs += run(sink)
    found = [(token.position, token.token_id) for token in tokens(outputs, move.key)]
    assert found == list(enumerate(fake_output(prompt, MAX_TOKENS)))[1:]
    assert_clean(source)
    assert_clean(sink)


@pytest.mark.parametrize("num_steps_on", [0, 2, 5])
@pytest.mark.parametrize("num_before", [1, 2, 3, 4])
def test_a_running_sequence_moves(num_before: int, num_steps_on: int) -> None:
    source, sink, prompt = of_whole_blocks(), of_whole_blocks(), [1, 2, 3, 5, 7, 11]
    expected, request = fake_output(prompt, 40), make_request(prompt, 40)
    source.submit(Move.key, request, [])
    made = [token.token_id for token in tokens([source.step() for _ in range(num_before)], Move.key)]
    source.outgoing.offer(Move.key, HANDOFF)
    sink.submit(Move.key, request, made, importing=True)
    move = Move(source, sink)
    for _ in range(num_steps_on):
        made += [token.token_id for token in tokens(move.hear([source.step()]), Move.key)]
        move.read()
    source.caught_up(HANDOFF)
    move.hear([source.step()])
    sealed = taken(source, sink, move)
    assert sealed.num_computed == (len(prompt) + len(made) - 1) // SIZE * SIZE
    source.end_lease(HANDOFF)
    sink.commit(move.key, seal_of(sealed), PullTimes())
    found = [(token.position, token.token_id) for token in tokens(run(sink), move.key)]
    assert found == list(enumerate(expected))[len(made) :]
    assert_clean(source)
    assert_clean(sink)


@pytest.mark.parametrize("num_prompt", [7, 8, 9])
def test_a_prefix_that_fills_its_last_block_is_taken_but_for_that(num_prompt: int) -> None:
    """The logits of the last token are needed, and a sequence goes on at the start of a block."""
    source, sink, prompt = of_whole_blocks(), of_whole_blocks(), list(range(1, num_prompt + 1))
    source.submit("0/0", make_request(prompt, 1), [])
    run(source)
    move, request = Move(source, sink), make_request(prompt, MAX_TOKENS)
    sink.submit(move.key, request, [], prefix=True)
    source.outgoing.offer_prefix(HANDOFF, prompt, b"")
    move.hear([source.step()])
    move.commit()
    outputs = run(sink)
    assert tokens(outputs, move.key)[0].num_cached == (num_prompt - 1) // SIZE * SIZE
    assert [token.token_id for token in tokens(outputs, move.key)] == fake_output(prompt, MAX_TOKENS)
    assert_clean(sink)


def test_no_more_sequences_come_than_may_run() -> None:
    """A KV tail has room for the sequences of a step."""
    sink, granted = make(max_running=2), list[str]()
    sink.cache.whole_blocks = True
    sink.submit("0/0", make_request([1] * 5, 3), [])
    sink.step()
    for key in ("0/1", "0/2", "0/3"):
        sink.submit(key, make_request([int(key[-1])] * 4, 5), [], importing=True)
        sink.incoming.reserve(key, 4, lambda _, key=key: granted.append(key))
    assert granted == ["0/1"]
    run(sink)
    assert granted == ["0/1", "0/2"]
    sink.commit("0/1", Seal(0, 4, (7,), multiple=SIZE), PullTimes())
    assert granted == ["0/1", "0/2"]
    run(sink)
    assert granted == ["0/1", "0/2", "0/3"]
    for key in ("0/2", "0/3"):
        sink.abort(key)
        sink.fail_import(key, quarantine=False)
    assert_clean(sink)


def test_answers_to_one_prompt_share_full_blocks_alone() -> None:
    engine, prompt = of_whole_blocks(), list(range(1, 12))
    for i in range(3):
        engine.submit(f"0/{i}", make_request(prompt, MAX_TOKENS), [])
    outputs = run(engine)
    assert all([t.token_id for t in tokens(outputs, f"0/{i}")] == fake_output(prompt, MAX_TOKENS) for i in range(3))
    assert engine.scheduler.prompts.num_cached == 2 * 8
    assert engine.check_integrity().load.num_prefill_tokens == 11 + 2 * 3


def test_a_seal_of_another_number_of_tokens_is_refused() -> None:
    for num_computed, multiple in ((4, 1), (8, 4), (0, 4), (5, 4)):
        sink = make()
        sink.submit(Move.key, make_request([1, 2, 3, 4, 5, 6], MAX_TOKENS), [], importing=True)
        sink.incoming.reserve(Move.key, 6, lambda _: None)
        with pytest.raises(HandoffError, match=f"the source sealed {num_computed} tokens and 1 outputs"):
            sink.commit(Move.key, Seal(0, num_computed, (7,), multiple=multiple), PullTimes())
