"""Drafts of a model: answers are those without, and the draft's KV is what the draft alone computes."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.kernels.cpu.attention import unpack
from diptych.workers.common.errors import ConfigError
from diptych.workers.common.request import Grammar, GrammarKind, Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import Sequence as Seq
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.grammar.compiler import GrammarCompiler
from diptych.workers.kv.layout import DOT

from ....support.checkpoints import random_prompts
from ....support.drafters import FreeRows
from ....support.engines import assert_clean, run, tokens
from ...conftest import CheckpointOf
from .conftest import DraftOf

EXAMPLES = Path(__file__).parents[4] / "examples"
LENGTHS = (1, 5, 16, 17, 40, 63, 100, 130)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=11)
PENALISED = replace(SEEDED, repetition_penalty=1.3, presence_penalty=0.4, logprobs=2)
SAMPLINGS = [GREEDY, SEEDED, PENALISED, replace(SEEDED, top_k=20, min_p=0.02)] * 2


def load(path: Path, draft: Path | None, **changes: Any) -> ModelRunner:
    config = WorkerConfig.of(path, dtype="float32", max_context_tokens=256, kv_memory_bytes=64 << 20)
    drafting = {"speculation": "draft", "draft_model": str(draft)} if draft is not None else {}
    return ModelRunner.load(config.changed(**drafting, **changes))


class Drafting:
    """An engine whose steps always draft `depth` tokens, whatever they cost."""

    def __init__(self, runner: ModelRunner, depth: int = 4, method: str = "draft", **config: Any) -> None:
        assert runner.proposer is not None
        speculator = FreeRows(method, runner.proposer, depth)
        self.engine = Engine(runner, SchedulerConfig(**config), drafter=speculator)
        for rows in range(1, 200):
            speculator.measured(rows, 1.0)


def submit(engine: Engine, vocab_size: int, samplings: Sequence[SamplingParams]) -> None:
    prompts = random_prompts(3, LENGTHS, vocab_size)
    for i, sampling in enumerate(samplings):
        request = Request(str(i), tuple(prompts[i % len(prompts)]), replace(sampling, seed=sampling.seed + i), 60.0)
        engine.submit(f"0/{i}", request, [])


def counts(engine: Engine, method: str = "draft") -> tuple[int, int]:
    """Tokens that were drafted, and accepted."""
    (found,) = engine.check_integrity().load.drafts
    assert found.method == method
    return found.num_drafted, found.num_accepted


def answers(engine: Engine, vocab_size: int, samplings: Sequence[SamplingParams]) -> list[list[int]]:
    submit(engine, vocab_size, samplings)
    outputs = run(engine)
    assert_clean(engine)
    return [[event.token_id for event in tokens(outputs, f"0/{i}")] for i in range(len(samplings))]


@pytest.mark.parametrize("isa", ["auto", "none"])
@pytest.mark.parametrize("noise", [0.0, 0.15, 1.0])
def test_answers_are_those_without_drafts(
    checkpoint_of: CheckpointOf, draft_of: DraftOf, noise: float, isa: str
) -> None:
    path = checkpoint_of("llama")
    plain = load(path, None, cpu_isa=isa)
    expected = answers(Engine(plain, SchedulerConfig()), plain.info.vocab_size, SAMPLINGS)
    runner = load(path, draft_of("llama", noise), cpu_isa=isa)
    drafting = Drafting(runner, chunk_tokens=40)
    assert answers(drafting.engine, runner.info.vocab_size, SAMPLINGS) == expected
    drafted, accepted = counts(drafting.engine)
    assert drafted > 20
    if noise == 0.0:
        assert accepted > 0.75 * drafted  # drafts beyond an answer's end are not
    if noise == 1.0:
        assert accepted < 0.3 * drafted


@pytest.mark.parametrize(
    ("arch", "draft_arch"), [("qwen3-windows", "llama"), ("deepseek-v3", "deepseek-v3"), ("deepseek-v3", "llama")]
)
def test_a_draft_of_another_architecture(
    checkpoint_of: CheckpointOf, draft_of: DraftOf, arch: str, draft_arch: str
) -> None:
    """Its layers may have other heads than the target's. Latents draft for latents, and so do keys and values."""
    plain = load(checkpoint_of(arch), None)
    expected = answers(Engine(plain, SchedulerConfig()), plain.info.vocab_size, SAMPLINGS)
    runner = load(checkpoint_of(arch), draft_of(draft_arch, 0.05))
    assert answers(Drafting(runner).engine, runner.info.vocab_size, SAMPLINGS) == expected
    assert runner.layout.num_draft_layers > 0


def draft_kv(runner: ModelRunner, sequence: Seq, first_layer: int, num_layers: int) -> torch.Tensor:
    """[layers, 2, tokens, heads, dim]: KV of the sequence's first `num_draft_computed` tokens."""
    blocks = torch.tensor(sequence.block_table)
    layers = [runner._cache.layer(first_layer + i)[blocks] for i in range(num_layers)]
    if (runner.layout.draft_packing or runner.layout.packing) == DOT:
        layers = [unpack(layer) for layer in layers]
    return torch.stack([layer.transpose(0, 1).flatten(1, 2) for layer in layers])[:, :, : sequence.num_draft_computed]


def test_the_drafts_kv_is_what_the_draft_computes_alone(checkpoint_of: CheckpointOf, draft_of: DraftOf) -> None:
    """Prompt chunks, passes, rejected tokens, tokens decoded without drafts, preemption, shared and copied blocks."""
    draft = draft_of("llama", 0.15)
    runner = load(checkpoint_of("llama"), draft, cpu_isa="none", kv_memory_bytes=1200 << 10)
    check_draft_kv(runner, load(draft, None, cpu_isa="none"))


def check_draft_kv(runner: ModelRunner, alone: ModelRunner) -> None:
    """runner: has so few blocks that sequences are preempted; alone: computes the draft as a model of its own."""
    drafting, vocab_size = Drafting(runner, chunk_tokens=40), runner.info.vocab_size
    engine = drafting.engine
    long = replace(SEEDED, max_tokens=60)
    prompts = random_prompts(3, LENGTHS, vocab_size)
    for i in range(16):  # each prompt twice, so that the second one shares blocks
        engine.submit(f"0/{i}", Request(str(i), tuple(prompts[i // 2]), replace(long, seed=i), 60.0), [])
    num_steps = num_compared = 0
    layers = runner.layout.num_target_layers, runner.layout.num_draft_layers
    while engine.scheduler.has_work:
        engine.step()
        num_steps += 1
        if num_steps % 11:
            continue
        for sequence in list(engine._sequences.values()):
            if sequence.num_draft_computed < 2:
                continue
            own = draft_kv(runner, sequence, *layers)
            check = Engine(alone, SchedulerConfig(), prefix_cache=False)
            ids = tuple(sequence.token_ids[: sequence.num_draft_computed])
            check.submit("0/x", Request("x", ids, replace(GREEDY, max_tokens=2), 60.0), [])
            check.step()
            (reference,) = check._sequences.values()
            reference.num_draft_computed = sequence.num_draft_computed
            torch.testing.assert_close(own, draft_kv(alone, reference, 0, layers[1]), atol=2e-4, rtol=1e-3)
            num_compared += 1
    assert_clean(engine)
    assert num_compared > 10
    assert engine.scheduler.num_preemptions > 0


def test_kv_that_no_draft_computed_is_computed_anew(checkpoint_of: CheckpointOf, draft_of: DraftOf) -> None:
    runner = load(checkpoint_of("llama"), draft_of("llama", 0.0))
    drafting, vocab_size = Drafting(runner), runner.info.vocab_size
    engine, proposer = drafting.engine, runner.proposer
    assert proposer is not None
    request = Request("0", tuple(random_prompts(3, [100], vocab_size)[0]), GREEDY, 60.0, speculates=False)
    engine.submit("0/0", request, [])
    outputs = run(engine)
    assert proposer.num_anew == 0
    expected = [event.token_id for event in tokens(outputs, "0/0")]
    engine.submit("0/1", replace(request, speculates=True), [])
    outputs = run(engine)
    assert [event.token_id for event in tokens(outputs, "0/1")] == expected
    # The blocks of the first one hold no KV of the draft: those of the prompt, and one that is full of equal answers.
    assert 96 <= proposer.num_anew <= 96 + 2 * 16
    num_anew = proposer.num_anew
    engine.submit("0/2", replace(request, speculates=True), [])
    run(engine)
    assert proposer.num_anew == num_anew
    assert_clean(engine)


def test_the_load_report_counts_what_the_draft_computes_anew() -> None:
    engine = Drafting(load(EXAMPLES / "tiny", EXAMPLES / "tiny_draft")).engine
    prompt = tuple(random_prompts(3, [100], 2048)[0])
    for i, speculates in enumerate((False, True)):
        short = replace(GREEDY, max_tokens=2)  # no block of the answer is full
        engine.submit(f"0/{i}", Request(str(i), prompt, short, 60.0, speculates=speculates), [])
        run(engine)
        num_cached = 96 if speculates else 0  # tokens, in blocks that the first one left without the draft's KV
        assert engine.check_integrity().load.num_draft_tokens_anew == num_cached


def test_grammars_hold_and_drafts_do_not_know_them() -> None:
    runner = load(EXAMPLES / "tiny", EXAMPLES / "tiny_draft")
    grammars = GrammarCompiler.of_folder(EXAMPLES / "tiny", 2048, (3, 2))
    form = Grammar(GrammarKind.REGEX, "[a-z]{2,9}( [a-z]+){3,5}!")
    sampling = replace(SEEDED, grammar=form, ignore_eos=False)
    found: list[list[list[int]]] = []
    for engine in (Engine(runner, SchedulerConfig()), Drafting(runner).engine):
        for i in range(4):
            request = Request(str(i), tuple(range(5, 30 + i)), replace(sampling, seed=i), 60.0)
            engine.submit(f"0/{i}", request, [], grammar=grammars.compile(form))
        outputs = run(engine)
        found.append([[event.token_id for event in tokens(outputs, f"0/{i}")] for i in range(4)])
        assert_clean(engine)
    assert found[0] == found[1]


def test_the_shipped_draft_drafts_for_the_shipped_model() -> None:
    """At any temperature: the draft draws with the noise that the target draws with."""
    for sampling in (GREEDY, SEEDED):
        runner = load(EXAMPLES / "tiny", EXAMPLES / "tiny_draft")
        drafting = Drafting(runner)
        prompt = (1, *range(300, 340))
        for i in range(4):
            request = Request(str(i), prompt, replace(sampling, max_tokens=60, seed=i), 60.0)
            drafting.engine.submit(f"0/{i}", request, [])
        run(drafting.engine)
        drafted, accepted = counts(drafting.engine)
        assert accepted > 0.25 * drafted > 10


def test_what_cannot_draft_is_refused_by_name(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    llama, tiny = checkpoint_of("llama"), EXAMPLES / "tiny"
    with pytest.raises(ConfigError, match=r"tiny_draft.*2,048 tokens.*llama.* 500"):
        load(llama, EXAMPLES / "tiny_draft")
    with pytest.raises(ConfigError, match=r"deepseek-v3 has latent attention, and .*llama has none"):
        load(llama, checkpoint_of("deepseek-v3"))
    other = tmp_path / "other"
    shutil.copytree(EXAMPLES / "tiny_draft", other)
    file = json.loads((other / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = file["model"]["vocab"]
    first, second = sorted(vocabulary)[500:502]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ConfigError, match=r"other has another vocabulary than .*tiny: the token '.*' has the id \d+"):
        load(tiny, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    shutil.copy(EXAMPLES / "tiny_draft" / "tokenizer.json", other)
    with pytest.raises(ConfigError, match="128 positions, fewer than max_context_tokens=256"):
        load(tiny, other)
    for changes, text in (
        ({"speculation": "draft"}, "draft_model is missing"),
        (
            {"speculation": "ngram", "draft_model": str(other)},
            "draft_model is given, but speculation ngram does not use it",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            WorkerConfig.of(tiny, **changes)
