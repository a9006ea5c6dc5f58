"""KV of a model that drafts moves between engines with the target's: every count, segment and slot."""

import pytest

from diptych.workers.core.sequence import SampledToken, Sequence
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.handoff.types import HandoffSealed, Reservation, SegmentReady
from diptych.workers.testing.fake_runner import fake_output
from diptych.workers.testing.fake_stream import FakeStep

from ...support.draft_runner import DraftRunner, drafted_of, make_drafting, runner_of
from ...support.engines import HANDOFF, Move, assert_clean, make, reserve, run, tokens
from ...support.sequences import make_request

PROMPT = list(range(1, 18))  # four full blocks of four, and a token
BLOCK = 4


def segments(output: StepOutput) -> list[tuple[int, int, int, int]]:
    """(first block, blocks, first layer, layers) of each."""
    found = [e.segment for e in output.handoffs if isinstance(e, SegmentReady)]
    return [(s.first_block, len(s.block_ids), s.first_layer, s.num_layers) for s in found]


def sequence_of(engine: Engine, key: str = "0/1") -> Sequence:
    return engine._sequences[key]  # pyright: ignore[reportPrivateUsage]


def importing(source: Engine, sink: Engine, prompt: list[int] = PROMPT) -> Move:
    """A prompt's hand-off, for which the sink has its blocks."""
    source.submit("0/1", make_request(prompt, 9), [], handoff_id=HANDOFF)
    sink.submit("0/1", make_request(prompt, 9), [], importing=True)
    reservation = reserve(sink, "0/1", len(prompt))
    assert isinstance(reservation, Reservation)
    return Move(source, sink, reservation=reservation)


def handed_over(move: Move, num_steps: int = 1) -> list[int]:
    """Run so many steps at the source, of which each is read at once, and commit. Returns the tokens of the source."""
    outputs: list[StepOutput] = []
    for _ in range(num_steps):
        outputs += move.hear([move.source.step()])
        move.read()
    move.commit()
    return [e.token_id for e in tokens(outputs, "0/1")]


def assert_counted(sink: Engine, num_tokens: int, key: str = "0/1") -> None:
    """Assert that so many leading tokens have the draft's KV, and that it is theirs."""
    sequence = sequence_of(sink, key)
    assert sequence.num_draft_computed == num_tokens
    found = runner_of(sink).drafted(sequence.block_table, num_tokens)
    assert found == drafted_of(sequence.token_ids[:num_tokens])
    assert sink.draft_kv is not None
    assert all(sink.draft_kv.has(block) for block in sequence.block_table[: num_tokens // BLOCK])


@pytest.mark.parametrize("layer_groups", [1, 3])
@pytest.mark.parametrize(("chunk_tokens", "num_steps"), [(0, 1), (6, 3), (5, 4)])
def test_a_prompt_brings_its_drafts_kv(layer_groups: int, chunk_tokens: int, num_steps: int) -> None:
    source = make_drafting(layer_groups=layer_groups, chunk_tokens=chunk_tokens)
    sink = make_drafting()
    move = importing(source, sink)
    made = handed_over(move, num_steps)
    assert all(s.first_layer >= 3 or s.first_layer + s.num_layers <= 3 for s in move.segments)
    assert_counted(sink, len(PROMPT))
    assert made + [e.token_id for e in tokens(run(sink), "0/1")] == fake_output(PROMPT, 9)
    assert_clean(source)
    assert_clean(sink)


def test_the_drafts_layers_of_a_block_follow_once_they_are_counted() -> None:
    engine = make_drafting(layer_groups=2, chunk_tokens=6)
    engine.submit("0/1", make_request(PROMPT, 5), [], handoff_id=HANDOFF)
    outputs = [engine.step() for _ in range(3)]
    # 6 tokens: block 0; 12: blocks 1 and 2; 17: block 3, and 4 of which one slot is filled.
    assert [segments(output) for output in outputs] == [
        [(0, 1, 0, 1), (0, 1, 1, 2)],
        [(0, 1, 3, 2), (1, 2, 0, 1), (1, 2, 1, 2)],
        [(1, 2, 3, 2), (3, 2, 0, 1), (3, 2, 1, 2), (3, 2, 3, 2)],
    ]
    sealed = outputs[-1].handoffs[-1]
    assert isinstance(sealed, HandoffSealed) and sealed.num_draft_computed == 17


def test_a_draft_that_comes_later_is_read_when_it_is_there() -> None:
    """The target's KV of the first blocks is read before the draft's is computed."""
    source, sink = make_drafting(chunk_tokens=6), make_drafting()
    move = importing(source, sink)
    runner_of(source).drafts = False
    for _ in range(2):
        move.hear([source.step()])
        move.read()
    assert move.num_read > 0 and all(s.first_layer == 0 for s in move.segments)
    runner_of(source).drafts = True
    handed_over(move)
    assert_counted(sink, len(PROMPT))


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_what_has_no_drafts_kv_is_not_moved(num_steps: int) -> None:
    """The draft stops after this many chunks of six tokens."""
    source, sink = make_drafting(chunk_tokens=6), make_drafting()
    move = importing(source, sink)
    for number in range(3):
        runner_of(source).drafts = number < num_steps
        move.hear([source.step()])
    move.commit()
    assert sum(len(s.block_ids) for s in move.segments if s.first_layer == 3) == -(-6 * num_steps // BLOCK)
    assert_counted(sink, 6 * num_steps)
    runner_of(sink).drafts = True
    run(sink)
    assert_clean(sink)


@pytest.mark.parametrize("layer_groups", [1, 3])
@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 6])
def test_a_running_sequence_brings_what_the_draft_has(num_steps: int, drafts: bool, layer_groups: int) -> None:
    """The draft stops where the hand-off begins, or goes on with it."""
    prompt = [1, 2, 3, 5, 7, 11]
    source, sink = make_drafting(layer_groups=layer_groups), make_drafting()
    source.submit("0/1", make_request(prompt, 30), [])
    made = [e.token_id for e in tokens([source.step() for _ in range(3)], "0/1")]
    source.outgoing.offer("0/1", HANDOFF)
    sink.submit("0/1", make_request(prompt, 30), made, importing=True)
    move, runner_of(source).drafts = Move(source, sink), drafts
    for _ in range(num_steps):
        made += [e.token_id for e in tokens(move.hear([source.step()]), "0/1")]
        move.read()
    source.caught_up(HANDOFF)
    move.hear([source.step()])
    move.commit()
    sequence = sequence_of(sink)
    assert sequence.num_computed == len(prompt) + len(made) - 1
    assert_counted(sink, sequence.num_computed if drafts else len(prompt) + 2)
    assert made + [e.token_id for e in tokens(run(sink), "0/1")] == fake_output(prompt, 30)
    assert_clean(source)
    assert_clean(sink)


def test_a_sequence_that_begins_before_the_release_is_answered_has_its_drafts_kv() -> None:
    source, sink = make_drafting(), make_drafting()
    move = importing(source, sink)
    made = [e.token_id for e in tokens(move.hear([source.step()]), "0/1")]
    move.begin()
    assert_counted(sink, len(PROMPT))
    assert not sink.step().tokens
    move.commit()
    assert_counted(sink, len(PROMPT) + 1)
    assert made + [e.token_id for e in tokens(run(sink), "0/1")] == fake_output(PROMPT, 9)
    assert_clean(sink)


def warm(prompt: list[int], *, drafts: bool = True, engine: Engine | None = None) -> Engine:
    """An engine whose cache holds the full blocks of `prompt`."""
    engine = engine or make_drafting()
    runner_of(engine).drafts = drafts
    engine.submit("9/9", make_request(prompt, 1), [])
    run(engine)
    runner_of(engine).drafts = True
    return engine


@pytest.mark.parametrize(
    ("num_prompt", "num_drafted", "num_counted"), [(17, 16, 16), (16, 16, 15), (17, 8, 8), (17, 0, 0)]
)
def test_a_cached_prefix_brings_what_the_draft_has(num_prompt: int, num_drafted: int, num_counted: int) -> None:
    """Of a prompt whose every block came, the last token is computed again."""
    prompt = PROMPT[:num_prompt]
    source = warm(prompt[: num_drafted + 1])
    if num_drafted < num_prompt:
        warm(prompt, drafts=False, engine=source)
    sink = make_drafting()
    source.outgoing.offer_prefix(HANDOFF, prompt, b"")
    sink.submit("0/1", make_request(prompt, 5), [], prefix=True)
    move = Move(source, sink)
    move.hear([source.step()])
    assert move.sealed is not None and move.sealed.num_draft_computed == num_drafted
    assert sum(len(s.block_ids) for s in move.segments if s.first_layer == 3) == num_drafted // BLOCK
    move.commit()
    assert_counted(sink, num_counted)
    assert [e.token_id for e in tokens(run(sink), "0/1")] == fake_output(prompt, 5)
    assert_clean(source)
    assert_clean(sink)


@pytest.mark.parametrize(("num_drafted", "num_counted"), [(0, 0), (4, 4), (8, 17)])
def test_the_count_stops_at_a_block_that_was_here_without_the_drafts_kv(num_drafted: int, num_counted: int) -> None:
    """Two blocks are here already, and the draft's KV of so many of their tokens."""
    source, sink = make_drafting(), warm(PROMPT[: num_drafted + 1])
    warm(PROMPT[:9], drafts=False, engine=sink)
    move = importing(source, sink)
    assert move.reservation is not None and move.reservation.num_held_tokens == 8
    handed_over(move)
    assert_counted(sink, num_counted)
    assert sink.draft_kv is not None
    table = sequence_of(sink).block_table
    assert [sink.draft_kv.has(block) for block in table[:4]] == [num_drafted > 0, num_drafted > 4, True, True]


@pytest.mark.parametrize(
    ("num_chunks", "num_here", "num_counted"), [(3, 16, 17), (3, 0, 0), (3, 4, 4), (1, 4, 4), (1, 16, 6)]
)
def test_blocks_that_the_cache_puts_in_place_of_those_that_arrived_are_counted(
    num_chunks: int, num_here: int, num_counted: int
) -> None:
    """The sink computes the same prompt itself while it arrives, with the draft's KV of so many tokens. That of so many
    chunks of six tokens arrives."""
    source, sink = make_drafting(chunk_tokens=6), make_drafting()
    move = importing(source, sink)
    for number in range(3):
        runner_of(source).drafts = number < num_chunks
        move.hear([source.step()])
    move.read()
    before = list(sequence_of(sink).block_table)
    if num_here:
        warm(PROMPT[: num_here + 1], engine=sink)
    warm(PROMPT, drafts=False, engine=sink)
    move.commit()
    assert not set(before[:4]) & set(sequence_of(sink).block_table[:4])
    assert_counted(sink, num_counted)


class Credulous(DraftRunner):
    """Counts for the sequence "0/b", which it does not draft for, what equal blocks of "0/a" have."""

    def _compute(self, step: FakeStep) -> list[SampledToken]:
        rows, step.rows = step.rows, [row for row in step.rows if row.sequence.key == "0/a"]
        super()._compute(step)
        self.drafts, step.rows = False, rows
        sampled = super()._compute(step)
        for row in rows:
            row.sequence.num_draft_computed = len(row.token_ids)
        return sampled


def test_only_what_the_leased_blocks_have_is_sealed() -> None:
    """Of two equal prompts the second's table names the first's blocks in the end, but its own were announced."""
    engine = make_drafting(Credulous())
    engine.scheduler._shared.park = lambda sequence, num_cached, beside=None: False  # type: ignore[method-assign]
    for key in ("a", "b"):
        engine.submit(f"0/{key}", make_request([5] * 9, 5), [], handoff_id=key)
    sealed = [e for e in engine.step().handoffs if isinstance(e, HandoffSealed)]
    assert [(e.handoff_id, e.num_draft_computed) for e in sealed] == [("a", 9), ("b", 0)]


def test_an_engine_without_draft_layers_keeps_no_count() -> None:
    source, sink = make(), make()
    assert source.draft_kv is None
    move = importing(source, sink)
    handed_over(move)
    assert sequence_of(sink).num_draft_computed == 0 and all(s.num_layers == 1 for s in move.segments)
