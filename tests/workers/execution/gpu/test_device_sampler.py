"""Sampling on the device against workers/sampling/sampler.py: the same tokens, in steps as an engine makes them.

The device computes as late as it may.
"""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from diptych.workers.common.errors import ConfigError
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.core.sequence import DraftEntry, SampledRow, SampledToken, Sequence
from diptych.workers.device.fake_device import FakeDevice, FakeEvent
from diptych.workers.execution.gpu.device_sampler import DeviceSampler
from diptych.workers.sampling.grammar_masks import GrammarMasks
from diptych.workers.sampling.sampler import Sampler

from ....support.grammars import compiled, regex, text_of

EOS = (3, 0)
MAX_ROWS = 10
PLAIN = SamplingParams(max_tokens=1000)
PENALISED = replace(PLAIN, repetition_penalty=1.7, frequency_penalty=0.4)


def sequence(sampling: SamplingParams, prompt: SequenceOf[int] = (1,), output: SequenceOf[int] = ()) -> Sequence:
    request = Request("request", tuple(prompt), sampling, timeout_s=60.0)
    return Sequence("0/0", request, [*prompt, *output], len(prompt), deadline=1e9, arrival=0)


def random_sampling(numbers: random.Random, vocab_size: int) -> SamplingParams:
    """Most settings are off, so that any two may meet."""

    def maybe(off: object, *values: object) -> object:
        return numbers.choice(values) if numbers.random() < 0.3 else off

    asked = {
        "temperature": numbers.choice([0.0, 1.0, 0.7, 1.8, 1e-9]),
        "top_k": maybe(0, 1, 5, 40, vocab_size + 3),
        "top_p": maybe(1.0, 0.9, 0.5, 1e-6),
        "min_p": maybe(0.0, 0.02, 0.3),
        "repetition_penalty": maybe(1.0, 1.7, 0.6),
        "presence_penalty": maybe(0.0, 0.7, -0.5),
        "frequency_penalty": maybe(0.0, 0.3, -1.1),
        "logit_bias": maybe({}, {1: 5.0}, {i: numbers.uniform(-9, 9) for i in range(0, vocab_size, 3)}, {EOS[0]: 80.0}),
        "min_tokens": maybe(0, 2, 6),
        "stop_token_ids": maybe((), (2,), (2, EOS[0])),
        "logprobs": maybe(None, 0, 1, 3, 20),
        "seed": numbers.getrandbits(64),
    }
    return replace(PLAIN, **asked)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Asked:
    event: FakeEvent
    tokens: Tensor  # pinned
    num: int


@dataclass
class Steps:
    """What an engine does with a sampler, in two sets of buffers in turn."""

    vocab_size: int
    max_rows: int = MAX_ROWS
    device: FakeDevice = field(default_factory=FakeDevice)
    graphs: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict[tuple[int, int], Callable[[], None]])

    def __post_init__(self) -> None:
        self.sampler = DeviceSampler(self.vocab_size, EOS, self.max_rows, self.device)
        self.lane = self.device.lane("main")
        self.logits = torch.zeros(self.max_rows, self.vocab_size)
        self.tokens = torch.full((self.max_rows,), -1)
        self.back = [self.device.pinned((self.max_rows,), torch.int64) for _ in range(2)]
        self.index = 0
        self.is_plain = False  # the last step

    def launch(
        self, logits: Tensor, sequences: SequenceOf[SampledRow], *, num_ahead: int = 0, bucket: int = 0
    ) -> Asked:
        """bucket: number of rows, if the step is captured."""
        index, num = self.index, len(sequences)
        self.index = 1 - index
        positions = [s.num_tokens + num_ahead for s in sequences]
        self.is_plain = self.sampler.write(index, sequences, positions, range(num) if num_ahead else ())
        logits = logits.clone()
        self.lane.run(lambda: self.logits[:num].copy_(logits))
        if bucket:
            assert self.is_plain
            if (index, bucket) not in self.graphs:
                self.graphs[index, bucket] = self.device.capture(self.lane, partial(self._step, index, bucket))
            self.lane.run(self.graphs[index, bucket])
        else:
            self.lane.run(lambda: self.sampler.upload(index))
            self.lane.run(lambda: self.sampler.process_and_choose(index, self.logits, self.tokens))
        self.lane.run(lambda: self.back[index].copy_(self.tokens, non_blocking=True))
        return Asked(self.lane.record(), self.back[index], num)

    def wait(self, index: int, asked: Asked) -> list[SampledToken]:
        asked.event.wait()
        return self.sampler.sampled(index, asked.tokens[: asked.num].tolist())

    def step(self, logits: Tensor, sequences: SequenceOf[SampledRow], bucket: int = 0) -> list[SampledToken]:
        index = self.index
        return self.wait(index, self.launch(logits, sequences, bucket=bucket))

    def _step(self, index: int, bucket: int) -> None:
        self.sampler.upload(index)
        self.sampler.choose(index, self.logits[:bucket], self.tokens[:bucket], bucket)


def rows(num: int, vocab_size: int, seed: int) -> Tensor:
    """Of logits: every other has many ties."""
    logits = torch.randn(num, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    logits[1::2] = logits[1::2].bfloat16().float()
    return logits


def assert_as_sampled(found: SequenceOf[SampledToken], logits: Tensor, sequences: SequenceOf[SampledRow]) -> None:
    expected, raw = Sampler(EOS).sample(logits.clone(), sequences), logits.log_softmax(dim=-1)
    assert_same(found, expected, raw, sequences)


def assert_same(
    found: SequenceOf[SampledToken], expected: SequenceOf[SampledToken], raw: Tensor, sequences: SequenceOf[SampledRow]
) -> None:
    """raw: log-probabilities."""
    assert [t.token_id for t in found] == [t.token_id for t in expected]
    for row, (token, own, other) in enumerate(zip(found, sequences, expected, strict=True)):
        assert token.sequence is own.sequence
        assert (token.logprob is None) == (other.logprob is None)
        assert token.logprob is None or token.logprob == pytest.approx(other.logprob, abs=1e-5)
        ids, values = [i for i, _ in token.top], [p for _, p in token.top]
        assert values == pytest.approx([p for _, p in other.top], abs=1e-5)
        assert len(set(ids)) == len(ids) and values == pytest.approx(raw[row, ids].tolist(), abs=1e-5)


@pytest.mark.parametrize(("vocab_size", "num_steps"), [(5, 3), (7, 60), (1007, 40), (4999, 4)])
def test_any_batch_yields_the_tokens_of_the_sampler(vocab_size: int, num_steps: int) -> None:
    """Sequences come and go, and skip steps."""
    numbers, steps = random.Random(vocab_size), Steps(vocab_size)
    running: list[Sequence] = []
    for number in range(num_steps):
        running = [s for s in running if numbers.random() < 0.9]
        while len(running) < MAX_ROWS and numbers.random() < 0.8:
            prompt = [numbers.randrange(vocab_size) for _ in range(numbers.choice([1, 9, 40]))]
            output = [numbers.randrange(vocab_size) for _ in range(numbers.choice([0, 0, 3]))]
            running.append(sequence(random_sampling(numbers, vocab_size), prompt, output))
        batch = numbers.sample(running, numbers.randint(0, len(running)))
        if not batch:
            continue
        logits = rows(len(batch), vocab_size, number)
        sampled = steps.step(logits, batch)
        assert_as_sampled(sampled, logits, batch)
        for token in sampled:
            token.sequence.token_ids.append(token.token_id)


@pytest.mark.parametrize(("vocab_size", "num_steps"), [(9, 4), (60, 60)])
def test_rows_of_drafts_get_the_tokens_of_the_sampler(vocab_size: int, num_steps: int) -> None:
    """Beside other rows, with penalties, biases, min_tokens and log-probabilities; a draft that is rejected leaves no
    trace in the counts of its sequence."""
    numbers, steps = random.Random(3), Steps(vocab_size, max_rows=24)
    running: list[Sequence] = []
    for number in range(num_steps):
        running = [s for s in running if numbers.random() < 0.9]
        while len(running) < 6:
            running.append(sequence(random_sampling(numbers, vocab_size), [numbers.randrange(vocab_size)] * 3))
        batch: list[SampledRow] = []
        for one in numbers.sample(running, numbers.randint(1, 6)):
            drafted = [numbers.randrange(vocab_size) for _ in range(numbers.choice([0, 1, 3]))]
            batch += DraftEntry(one, 1 + len(drafted), drafted, "random").rows()
        logits = rows(len(batch), vocab_size, number)
        sampled = steps.step(logits, batch)
        assert_as_sampled(sampled, logits, batch)
        for token in {token.sequence: token for token in reversed(sampled)}.values():  # the first of each
            token.sequence.token_ids.append(token.token_id)


@pytest.mark.parametrize(("vocab_size", "num_steps"), [(23, 3), (533, 30)])
def test_a_graph_serves_any_plain_batch(vocab_size: int, num_steps: int) -> None:
    """Whatever its settings are, and however many of its rows are idle."""
    numbers, steps = random.Random(1), Steps(vocab_size)
    for number in range(num_steps):
        bucket = numbers.choice([1, 4, 10])
        batch = [
            sequence(
                replace(
                    random_sampling(numbers, vocab_size),
                    repetition_penalty=1.0,
                    presence_penalty=0.0,
                    frequency_penalty=0.0,
                    logit_bias={},
                    min_tokens=0,
                    logprobs=None,
                ),
                range(numbers.randint(1, 9)),
            )
            for _ in range(numbers.randint(1, bucket))
        ]
        logits = rows(len(batch), vocab_size, number)
        steps.lane.run(lambda: steps.logits.fill_(torch.nan))  # idle rows are of no number
        assert_as_sampled(steps.step(logits, batch, bucket), logits, batch)
        assert 0 <= int(steps.tokens[:bucket].min()) <= int(steps.tokens[:bucket].max()) < vocab_size
    assert steps.device.num_captured == min(num_steps, 6)


def test_rows_that_follow_grammars_get_the_tokens_of_the_sampler() -> None:
    """Beside rows that follow none, with penalties, biases and log-probabilities, until all have ended."""
    vocab_size, numbers = 1000, random.Random(4)
    patterns = ("[a-f]{2,9}", None, "(x|yz){1,6}!", "[0-9]{1,8}")

    def batch() -> list[Sequence]:
        found: list[Sequence] = []
        for i, pattern in enumerate(patterns):
            given = random_sampling(random.Random(i), vocab_size)
            if pattern is None:
                found.append(sequence(given))
            else:
                found.append(sequence(replace(given, grammar=regex(pattern), min_tokens=2, stop_token_ids=())))
                found[-1].matcher = compiled(regex(pattern), vocab_size).matcher(lambda e: pytest.fail(e.message))
        return found

    steps, own, others = Steps(vocab_size), batch(), batch()
    twin = Sampler(EOS, masks=GrammarMasks(vocab_size, EOS))
    for number in range(12):
        here = [i for i, s in enumerate(own) if s.num_output == 0 or s.token_ids[-1] not in EOS]
        chosen = [i for i in here if numbers.random() < 0.8]
        if not chosen:
            continue
        logits = rows(len(chosen), vocab_size, number)
        expected = twin.sample(logits.clone(), [others[i] for i in chosen])
        found = steps.step(logits, [own[i] for i in chosen])
        assert_same(found, expected, logits.log_softmax(dim=-1), [own[i] for i in chosen])
        for i, token in zip(chosen, found, strict=True):
            own[i].token_ids.append(token.token_id)
            others[i].token_ids.append(token.token_id)
    assert {text_of(own[0].output_token_ids)[:1]} <= set("abcdef")


STEPS_AHEAD = {
    "plain": [replace(PLAIN, seed=seed, top_p=0.9) for seed in range(4)],
    "penalised": [replace(PENALISED, seed=seed, presence_penalty=0.5) for seed in range(4)],
    "with bans": [replace(PLAIN, seed=seed, min_tokens=3 + seed, logit_bias={EOS[0]: 6.0}) for seed in range(4)],
    "with log-probabilities": [replace(PLAIN, seed=0, logprobs=3), *([PLAIN] * 2), replace(PLAIN, seed=1, logprobs=0)],
    **{f"of all sorts, {n}": [random_sampling(random.Random(4 * n + i), 301) for i in range(4)] for n in range(6)},
}


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("kind", STEPS_AHEAD)
def test_two_steps_under_way(kind: str, is_late: bool) -> None:
    """The second step takes its input from the first: its rows' tokens are one ahead of the host, which neither counts
    nor knows them."""
    steps = Steps(301, device=FakeDevice(is_late=is_late))
    batch = [sequence(sampling, [5, 9], [7]) for sampling in STEPS_AHEAD[kind]]
    under_way: list[tuple[int, Asked, Tensor]] = []
    for number in range(8):
        logits = rows(4, 301, number)
        asked = steps.launch(logits, batch, num_ahead=len(under_way), bucket=4 if kind == "plain" else 0)
        under_way.append((1 - steps.index, asked, logits))
        if len(under_way) == 2:
            index, asked, logits = under_way.pop(0)
            sampled = steps.wait(index, asked)
            assert_as_sampled(sampled, logits, batch)
            for token in sampled:
                token.sequence.token_ids.append(token.token_id)


def test_who_is_not_plain_now_may_be_later() -> None:
    steps, logits = Steps(50), torch.zeros(1, 50)
    logits[0, EOS[0]] = 9.0
    row = sequence(replace(PLAIN, temperature=0.0, min_tokens=2))
    for is_plain in (False, False, True, True):
        [token] = steps.step(logits, [row])
        assert steps.is_plain == is_plain == (token.token_id == EOS[0])
        row.token_ids.append(token.token_id)
    steps.step(logits.expand(2, 50), [row, sequence(replace(PLAIN, logprobs=0))])
    assert not steps.is_plain


def test_histories_outlive_others() -> None:
    """More sequences than slots, in turns; a sequence that returns after it lost its slot is counted again."""
    steps, numbers = Steps(40, max_rows=3), random.Random(0)
    everybody = [sequence(replace(PENALISED, seed=i), [i, i + 1]) for i in range(8)]
    for number in range(60):
        batch = numbers.sample(everybody, 3)
        logits = rows(3, 40, number)
        sampled = steps.step(logits, batch)
        assert_as_sampled(sampled, logits, batch)
        for token in sampled:
            token.sequence.token_ids.append(token.token_id)


def test_a_long_history_is_counted() -> None:
    steps, numbers = Steps(40), random.Random(0)
    prompt, output = ([numbers.randrange(40) for _ in range(num)] for num in (9000, 700))
    batch = [sequence(PENALISED, prompt, output), sequence(PLAIN)]
    for number in range(2):
        logits = rows(2, 40, number)
        assert_as_sampled(steps.step(logits, batch), logits, batch)
        batch[0].token_ids += [number] * 3


def test_a_step_that_was_never_computed_leaves_no_history() -> None:
    steps, batch = Steps(40), [sequence(PENALISED, range(9), [1, 2])]
    for number, is_computed in enumerate((True, False, True)):
        logits = rows(1, 40, number)
        if is_computed:
            assert_as_sampled(steps.step(logits, batch), logits, batch)
        else:
            steps.sampler.write(steps.index, batch, [batch[0].num_tokens])
            steps.sampler.forget()
        batch[0].token_ids.append(number)


def test_kernels_are_warmed_up_without_a_trace() -> None:
    steps = Steps(11)
    steps.lane.run(steps.sampler.warm_up)
    logits, batch = rows(1, 11, 0), [sequence(replace(PENALISED, logprobs=20), range(5))]
    assert_as_sampled(steps.step(logits, batch), logits, batch)


def test_a_vocabulary_too_large_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocabulary of 1000000 tokens"):
        DeviceSampler(1_000_000, EOS, 1, FakeDevice())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_interpreted_kernels_sample_the_same() -> None:
    cases = "any_batch and 5-3 or graph and 23-3 or drafts and 9-4 or warmed"
    program = "import sys, triton, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "-q", "-p", "no:cacheprovider", __file__, "-k", cases],
        env=os.environ | {"TRITON_INTERPRET": "1", "DIPTYCH_TRITON": "interpret"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
