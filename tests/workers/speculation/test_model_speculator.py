"""A model's drafts in a closed loop: virtual steps and passes of known costs, which accept with a set probability."""

import itertools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import pytest

from diptych.workers.core.draft import Draft, ModelDrafts
from diptych.workers.core.draft_kv import DraftKV
from diptych.workers.core.sequence import Sequence
from diptych.workers.speculation.lengths import choose_depths
from diptych.workers.speculation.methods import make_speculator
from diptych.workers.speculation.model_speculator import ModelSpeculator
from diptych.workers.speculation.synthetic import another, uniform

from .test_speculator import CURVES, sequences_of, token_at

MAX_TOKENS = 8


class Model:
    """A ModelProposer: its tokens are right with a set probability, its passes take `pass_s` seconds."""

    num_anew = 0

    def __init__(self, acceptance: float, pass_s: float) -> None:
        self.acceptance, self.pass_s, self.beside_s = acceptance, pass_s, 0.0
        self.seconds = 0.0
        self.num_passes = 0
        self.known: set[str] = set()
        self.able = True

    def attach(self, kv: DraftKV | None) -> None:
        assert kv is None

    def may_draft(self, sequence: Sequence) -> bool:
        return self.able

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> ModelDrafts:
        assert self.able
        num_passes = max(depth for _, depth in wanted)
        self.num_passes += num_passes
        self.seconds += num_passes * self.pass_s
        self.known |= {sequence.key for sequence, _ in wanted}
        drafts = [self._draft(*each) for each in wanted]
        return ModelDrafts(drafts, [self.pass_s] * num_passes, self.beside_s)

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        assert sequence.key in self.known

    def ended(self, sequence: Sequence) -> None:
        self.known.discard(sequence.key)

    def _draft(self, sequence: Sequence, depth: int) -> Draft:
        ids: list[int] = []
        for position in range(sequence.num_tokens, sequence.num_tokens + depth):
            is_right = uniform(1, position, sequence.request.sampling.seed) < self.acceptance
            ids.append(token_at(position) if is_right else another(token_at(position)))
        return Draft(ids, [0.7] * depth)


class Loop:
    def __init__(self, batch: int, acceptance: float, cost: Callable[[int], float], pass_s: float) -> None:
        self.sequences, self.cost = sequences_of(batch), cost
        for i, sequence in enumerate(self.sequences):
            sequence.key = f"0/{i}"
        self.model = Model(acceptance, pass_s)
        self.speculator = ModelSpeculator("draft", self.model, MAX_TOKENS)
        self.steps_s = 0.0

    def run(self, num_steps: int) -> float:
        """Tokens per second of these steps."""
        before = self.steps_s + self.model.seconds, self._num_tokens()
        for _ in range(num_steps):
            self._step()
        return (self._num_tokens() - before[1]) / (self.steps_s + self.model.seconds - before[0])

    def _num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.sequences)

    def _step(self) -> None:
        batch = len(self.sequences)
        drafts = self.speculator.draft(self.sequences, batch, 1 << 16, lambda _, num: num)
        num_rows = batch + sum(map(len, drafts))
        for sequence, draft in zip(self.sequences, drafts, strict=True):
            num_accepted = 0
            while num_accepted < len(draft) and draft[num_accepted] == token_at(sequence.num_tokens + num_accepted):
                num_accepted += 1
            if draft:
                self.speculator.verified(sequence, len(draft), num_accepted)
            sequence.token_ids += [token_at(sequence.num_tokens + i) for i in range(num_accepted + 1)]
        self.steps_s += self.cost(num_rows)
        self.speculator.measured(num_rows, self.cost(num_rows))


def fixed(batch: int, acceptance: float, cost: Callable[[int], float], pass_s: float, k: int) -> float:
    """Tokens per second where each sequence drafts k tokens."""
    return batch * sum(acceptance**i for i in range(k + 1)) / (cost(batch * (1 + k)) + k * pass_s)


@pytest.mark.parametrize(
    ("curve", "share", "batch", "acceptance"),
    [
        pytest.param(*each, marks=[pytest.mark.long] if i % 3 else [])
        for i, each in enumerate(itertools.product(CURVES, (0.05, 0.2, 0.6), (1, 4, 16), (0.0, 0.3, 0.7, 0.95)))
    ],
)
def test_never_much_slower_and_about_as_fast_as_the_best_depth(curve, share, batch, acceptance) -> None:
    """share: of a step's time that a pass takes."""
    cost = CURVES[curve]
    pass_s = share * cost(batch)
    loop = Loop(batch, acceptance, cost, pass_s)
    loop.run(100)  # until it knows what is usual
    rate = loop.run(400)
    assert rate >= 0.97 * fixed(batch, acceptance, cost, pass_s, 0)
    assert rate >= 0.88 * max(fixed(batch, acceptance, cost, pass_s, k) for k in range(MAX_TOKENS + 1))


def test_a_model_that_begins_to_be_right_is_found_out() -> None:
    cost = CURVES["reads, then computes"]
    loop = Loop(2, 0.0, cost, 0.1)
    loop.run(400)
    num_passes = loop.model.num_passes
    loop.run(400)
    assert 0 < loop.model.num_passes - num_passes < 0.1 * 400
    loop.model.acceptance = 0.9
    loop.run(2500)
    assert loop.run(200) >= 0.88 * max(fixed(2, 0.9, cost, 0.1, k) for k in range(MAX_TOKENS + 1))


@pytest.mark.parametrize(("step_s", "num_rests"), [(3e-4, 66), (3e-3, 6), (3e-2, 0)])
def test_decisions_against_drafts_are_as_rare_as_steps_are_short(step_s: float, num_rests: int) -> None:
    """Deciding takes 100 us and may take 0.5 % of the time. What begins to pay is found out nevertheless."""
    loop = Loop(1, 0.0, lambda rows: step_s * (1 + 0.1 * (rows - 1)), 0.05 * step_s)
    loop.run(400)
    while not loop.speculator.rests():
        loop.run(1)
        if not num_rests:
            break
    rests = [loop.speculator.rests() for _ in range(num_rests)]
    assert rests == [True] * (num_rests - 1) + [False] * bool(num_rests)
    loop.model.acceptance = 0.95
    for _ in range(200):
        while loop.speculator.rests():
            loop.sequences[0].token_ids.append(token_at(loop.sequences[0].num_tokens))
        loop.run(1)
    num_tokens = loop.sequences[0].num_tokens
    loop.run(50)
    assert loop.sequences[0].num_tokens - num_tokens > 100


def test_what_a_draft_takes_beside_its_passes_is_paid_once() -> None:
    loop = Loop(1, 0.9, CURVES["rows are nearly free"], 0.01)
    loop.model.beside_s = 0.5
    loop.run(100)
    assert loop.speculator._draft_s(1) == pytest.approx(0.5, rel=0.01)
    assert loop.speculator._pass_s(1, 1.0)[1] == pytest.approx(0.01, rel=0.02)
    lengths = [len(draft) for draft in loop.speculator.draft(loop.sequences, 1, 100, lambda _, num: num)]
    assert lengths == [MAX_TOKENS]  # few tokens would not pay for it


def test_what_a_request_predicts_is_drafted_first_and_takes_no_pass() -> None:
    loop = Loop(1, 0.9, CURVES["rows are nearly free"], 0.01)
    (sequence,) = loop.sequences
    answer = tuple(token_at(position) for position in range(3, 100))
    sequence.request = replace(sequence.request, prediction=answer)
    loop.run(10)
    assert loop.model.num_passes == 0
    assert sequence.num_tokens >= 60
    loop.run(30)  # beyond its end
    assert loop.model.num_passes > 0


def test_a_model_that_cannot_draft_is_not_asked() -> None:
    loop = Loop(2, 0.9, CURVES["rows are nearly free"], 0.01)
    loop.model.able = False
    loop.run(20)
    assert loop.model.num_passes == 0


def test_a_draft_for_which_no_block_is_free_is_not_made() -> None:
    loop = Loop(2, 0.9, CURVES["rows are nearly free"], 0.01)
    loop.run(5)
    num_passes = loop.model.num_passes
    assert loop.speculator.draft(loop.sequences, 2, 100, lambda *_: 0) == [[], []]
    assert loop.model.num_passes == num_passes
    drafts = loop.speculator.draft(loop.sequences, 2, 100, lambda sequence, num: min(num, 1))
    assert [len(draft) for draft in drafts] == [1, 1]


def test_a_sequence_that_ended_leaves_nothing() -> None:
    loop = Loop(2, 0.9, CURVES["rows are nearly free"], 0.01)
    loop.run(5)
    assert loop.model.known
    loop.speculator.draft(loop.sequences, 2, 100, lambda _, num: num)
    for sequence in loop.sequences:
        loop.speculator.ended(sequence)
    assert not loop.model.known and not loop.speculator._drafted
    assert not any(of._records for of in (loop.speculator._usual, loop.speculator._sure, loop.speculator._foretold))


@pytest.mark.parametrize(
    ("chances", "pass_s", "expected"),
    [
        ([[0.9] * 4], [0.0, 0.1], [4]),  # 0.9 of a token for 0.1 of a step each
        ([[0.9] * 4], [0.0, 1.0], [0]),  # less than a token for a step
        ([[0.9, 0.1, 0.1]], [0.0, 0.3], [1]),
        ([[0.9, 0.9], [0.1, 0.1]], [0.0, 0.3, 0.4], [2, 0]),
        ([[0.3], [0.3], [0.3]], [0.0, 0.2, 0.2, 0.2], [1, 1, 1]),  # a pass that one alone does not pay
        ([[0.3], [0.0], [0.0]], [0.0, 0.2, 0.2, 0.2], [0, 0, 0]),
    ],
)
def test_depths_that_yield_the_most(chances: list[list[float]], pass_s: list[float], expected: list[int]) -> None:
    """Rows cost nothing, a pass its time."""
    assert choose_depths(chances, len(chances), [1.0] * 20, pass_s) == expected
    assert choose_depths(chances, len(chances), [1.0] * 20, pass_s, draft_s=4.0) == [0] * len(chances)


def test_the_method_of_a_model_needs_no_other_name() -> None:
    speculator = make_speculator("draft", MAX_TOKENS, 0.0, Model(0.5, 0.1))
    assert isinstance(speculator, ModelSpeculator) and speculator.method == "draft"
