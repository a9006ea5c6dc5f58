"""Sparse decodes of real models: what is exact, what equals what, and bounds that are never stale."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.kernels.cpu.attention import unpack
from diptych.kernels.cpu.load import library
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.handoff.types import Reservation
from diptych.workers.kv.layout import DOT
from diptych.workers.kv.segment import Segment

from ...support.checkpoints import make_checkpoint, random_prompts
from ...support.engines import HANDOFF, Move, assert_clean, reserve, run, tokens
from ..conftest import CheckpointOf

LENGTHS = (5, 60, 63, 64, 65, 100, 150)
BUDGET = 64  # four blocks: one of them by its score
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
# The compiled kernels' bounds and torch's; where torch takes long, the gate has it once.
ISAS = [pytest.param("auto", marks=pytest.mark.skipif(library() is None, reason="the kernels are not built")), "none"]
MOSTLY_COMPILED = [ISAS[0], pytest.param("none", marks=pytest.mark.long)]
Answers = dict[str, list[int]]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three of its five layers are sparse, so KV of sparse decodes differs from that of full attention."""
    return make_checkpoint(tmp_path_factory.mktemp("deep") / "llama", "llama", seed=5, num_hidden_layers=5)


def load(path: Path, isa: str = "auto", budget: int = BUDGET, **changes: Any) -> ModelRunner:
    settings: dict[str, Any] = {"dtype": "float32", "max_context_tokens": 512, "kv_memory_bytes": 8 << 20}
    if budget:
        settings |= {"sparse_attention": "quest", "sparse_budget_tokens": budget}
    return ModelRunner.load(WorkerConfig.of(path, cpu_isa=isa, **settings | changes))


def num_right_bounds(runner: ModelRunner, engine: Engine) -> int:
    """Compare the bounds by which the last sparse step of each running sequence chose with the keys in the pool, and
    return how many blocks they are of."""
    backend: Any = runner.backend
    cache, num_compared = backend._cache, 0
    for sequence in engine.scheduler.sequences():
        known = backend.steps._bounded._known.get(sequence)
        if known is None or known.table is not sequence.block_table:
            continue
        block_size = cache.layout.block_size
        blocks = torch.tensor(known.table[: -(-known.context_len // block_size)])
        for i, bounds in cache.bounds.layers.items():
            layer = cache.layer(i)[blocks]
            keys = (unpack(layer) if cache.layout.packing == DOT else layer)[:, 0].flatten(0, 1)
            each = keys[: known.context_len].split(block_size)
            expected = torch.stack([torch.stack((of.amin(0), of.amax(0)), dim=1) for of in each])
            assert torch.equal(bounds[blocks][..., : expected.shape[-1]], expected)
            num_compared += len(blocks)
    return num_compared


def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams = GREEDY,
    after: Callable[[Engine], object] = lambda _: None,
    **config: Any,
) -> Answers:
    """Answers to all prompts at once. after: called with the engine after each step."""
    engine = Engine(runner, SchedulerConfig(**config))
    for i, prompt in enumerate(prompts):
        engine.submit(f"0/{i}", Request(f"0/{i}", tuple(prompt), sampling, 600.0), [])
    outputs = [engine.step()]
    while engine.scheduler.has_work or engine.steps:
        outputs.append(engine.step())
        after(engine)
    assert_clean(engine)
    return answers(outputs, len(prompts))


def answers(outputs: list[StepOutput], num: int) -> Answers:
    return {f"0/{i}": [e.token_id for e in tokens(outputs, f"0/{i}")] for i in range(num)}


def checked(runner: ModelRunner, prompts: Sequence[Sequence[int]], **how: Any) -> Answers:
    """Answers, with the bounds compared after each step."""
    compared: list[int] = []
    found = generate(runner, prompts, after=lambda engine: compared.append(num_right_bounds(runner, engine)), **how)
    assert sum(compared) > 100
    return found


@pytest.mark.parametrize("isa", ISAS)
def test_it_is_off_by_default_and_a_budget_of_the_whole_context_changes_nothing(deep: Path, isa: str) -> None:
    config = WorkerConfig.of(deep)
    assert config.cache.sparse_attention == "none" and config.cache.sparse_budget == 0
    runners = load(deep, isa, budget=0), load(deep, isa, budget=192)
    assert [runner.info.sparse_budget for runner in runners] == [0, 192]
    full: Any = runners[0].backend
    assert not full._cache.bounds.layers
    prompts = random_prompts(3, LENGTHS)
    sampling = replace(GREEDY, logprobs=2)
    assert generate(runners[0], prompts, sampling) == generate(runners[1], prompts, sampling)


@pytest.mark.parametrize("isa", ISAS)
def test_tokens_within_the_budget_are_those_of_full_attention(deep: Path, isa: str) -> None:
    prompts = random_prompts(3, LENGTHS)
    full, sparse = (generate(load(deep, isa, budget), prompts) for budget in (0, BUDGET))
    for i, prompt in enumerate(prompts):
        # The token after a prompt, and those after contexts of up to the budget.
        num_exact = max(1, BUDGET - len(prompt) + 1)
        assert sparse[f"0/{i}"][:num_exact] == full[f"0/{i}"][:num_exact]
    assert sum(sparse[key] != full[key] for key in full) > 3


@pytest.mark.skipif(library() is None, reason="the kernels are not built")
@pytest.mark.parametrize("arch", ["deep", "qwen3moe"])
def test_the_backends_choose_alike(deep: Path, checkpoint_of: CheckpointOf, arch: str) -> None:
    path, prompts = deep if arch == "deep" else checkpoint_of(arch), random_prompts(3, LENGTHS)
    compiled, torch_computed = (generate(load(path, isa), prompts) for isa in ("auto", "none"))
    assert compiled == torch_computed


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("how", [{}, {"chunk_tokens": 48, "max_batch_tokens": 64}], ids=["whole", "chunks"])
def test_bounds_are_right_after_every_write(deep: Path, isa: str, how: dict[str, int]) -> None:
    runner, prompts = load(deep, isa), random_prompts(3, LENGTHS)
    found = checked(runner, prompts, **how)
    for i, prompt in enumerate(prompts):  # an answer does not depend on who is beside it
        assert generate(load(deep, isa), [prompt])["0/0"] == found[f"0/{i}"]


@pytest.mark.parametrize("isa", ISAS)
def test_bounds_are_right_after_copies(deep: Path, isa: str) -> None:
    """Completions of one prompt get a copy of its last block."""
    prompts = random_prompts(4, [100]) * 3
    runner, copied = load(deep, isa), list[tuple[int, int]]()
    backend: Any = runner.backend
    copy = backend.copy_blocks
    backend.copy_blocks = lambda pairs: (copied.extend(pairs), copy(pairs))
    found = checked(runner, prompts)
    assert len(copied) == 2 and found["0/0"] == found["0/1"] == found["0/2"]
    assert found["0/0"] == generate(load(deep, isa), prompts[:1])["0/0"]


@pytest.mark.parametrize("isa", MOSTLY_COMPILED)
def test_bounds_are_right_in_blocks_that_others_had(deep: Path, isa: str) -> None:
    """Sequences preempt each other, then the blocks serve others."""
    runner = load(deep, isa, kv_memory_bytes=600 << 10, max_context_tokens=256)
    assert runner.memory.num_blocks < 40
    num_preemptions: set[int] = set()
    compared: list[int] = []

    def after(engine: Engine) -> None:
        num_preemptions.add(engine.scheduler.num_preemptions)
        compared.append(num_right_bounds(runner, engine))

    generate(runner, random_prompts(5, [90, 100, 110, 120, 130]), after=after)
    assert max(num_preemptions) > 0 and sum(compared) > 100
    for prompt in random_prompts(6, [130, 70, 99]):
        assert checked(runner, [prompt]) == generate(load(deep, isa), [prompt])


@pytest.mark.skipif(library() is None, reason="the kernels are not built")
def test_a_step_ahead_has_the_tokens_of_lockstep(deep: Path) -> None:
    prompts = random_prompts(3, LENGTHS)
    expected = generate(load(deep), prompts)
    num_ahead: list[bool] = []
    runner = load(deep, look_ahead=True)
    assert generate(runner, prompts, after=lambda engine: num_ahead.append(bool(engine.steps))) == expected
    runner.close()
    assert sum(num_ahead) > 10


@pytest.mark.parametrize("isa", MOSTLY_COMPILED)
def test_requests_choose_for_themselves(deep: Path, isa: str) -> None:
    """Beside each other, each gets the answer that it gets alone from a worker that is set so."""
    prompts = random_prompts(3, LENGTHS)
    alike = [generate(load(deep, isa, budget), prompts) for budget in (0, BUDGET)]
    for by_default in (False, True):
        engine = Engine(load(deep, isa, sparse_by_default=by_default), SchedulerConfig())
        for i, prompt in enumerate(prompts):
            asked = None if (i % 2 == 1) is by_default else i % 2 == 1
            engine.submit(f"0/{i}", Request(f"0/{i}", tuple(prompt), GREEDY, 600.0, sparse_attention=asked), [])
        found = answers(run(engine), len(prompts))
        assert found == {f"0/{i}": alike[i % 2][f"0/{i}"] for i in range(len(prompts))}
        assert sum(alike[0][key] != alike[1][key] for key in found) > 3


@pytest.mark.parametrize("isa", ISAS)
def test_ranks_choose_for_their_own_heads(deep: Path, isa: str) -> None:
    """Bounds of a rank are of its own KV heads; processes compute, and are told which decodes are sparse."""
    prompts = random_prompts(3, LENGTHS)
    full, sparse = (generate(load(deep, isa, budget), prompts) for budget in (0, BUDGET))
    assert sum(sparse[key] != full[key] for key in full) > 3
    runner = load(deep, isa, tensor_parallel=2)
    try:
        assert checked(runner, prompts) == sparse
        assert generate(runner, prompts, chunk_tokens=48, max_batch_tokens=64) == sparse
    finally:
        runner.close()


class MemoryMove(Move):
    """Hand-off between engines with models of equal layouts: bytes are copied as the loopback transport does."""

    def read(self) -> None:
        source, sink = (engine._runner.memory for engine in (self.source, self.sink))
        assert source.region.view is not None and sink.region.view is not None and self.sealed is not None
        if self.reservation is None:
            num_tokens = self.sealed.num_computed if self.opened is None else self.opened.num_tokens
            granted = reserve(self.sink, self.key, num_tokens)
            assert isinstance(granted, Reservation)
            self.reservation = granted
        for segment in self.segments[self.num_read :]:
            self._copy(segment, source.region.view, sink.region.view, source.layout.block_bytes)
        self.num_read = len(self.segments)

    def _copy(self, segment: Segment, source: memoryview, sink: memoryview, size: int) -> None:
        assert self.reservation is not None
        for i, block in enumerate(segment.block_ids, segment.first_block):
            to = self.reservation.block_ids[i]
            if i * self.source.cache.block_size >= self.reservation.num_held_tokens:
                sink[to * size : (to + 1) * size] = source[block * size : (block + 1) * size]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("begins", [False, True])
def test_bounds_are_right_after_a_hand_off(deep: Path, isa: str, begins: bool) -> None:
    """From a worker that attends to all to one whose blocks have had other sequences, and from there to a third."""
    prompt = random_prompts(8, [133])[0]
    expected = generate(load(deep, isa), [prompt])["0/0"]
    runners = load(deep, isa, budget=0), load(deep, isa), load(deep, isa)
    engines = [Engine(runner, SchedulerConfig(), prefix_cache=False) for runner in runners]
    for runner in runners[1:]:
        generate(runner, random_prompts(9, [180, 170]))
    request = Request("0/1", tuple(prompt), GREEDY, 600.0)
    engines[0].submit("0/1", request, [], handoff_id=HANDOFF)
    made: list[int] = []
    for number, (source, sink) in enumerate(pairwise(engines)):
        if number:
            made += [e.token_id for e in tokens([source.step() for _ in range(12)], "0/1")]
            source.outgoing.offer("0/1", HANDOFF)
        sink.submit("0/1", request, made, importing=True)
        move = MemoryMove(source, sink)
        made += [e.token_id for e in tokens(move.hear([source.step()]), "0/1")]
        if number:
            source.caught_up(HANDOFF)
            made += [e.token_id for e in tokens(move.hear([source.step()]), "0/1")]
        outputs: list[StepOutput] = []
        if begins:
            move.begin()
            outputs.append(sink.step())
            num_compared = num_right_bounds(runners[number + 1], sink)
            assert num_compared > 0
        move.commit()
        outputs.append(sink.step())
        assert num_right_bounds(runners[number + 1], sink) > 0
        made += [e.token_id for e in tokens(outputs, "0/1")]
    made += [e.token_id for e in tokens(run(engines[-1]), "0/1")]
    assert made == expected
    for engine in engines:
        assert_clean(engine)


def test_a_model_without_such_layers_attends_to_all(checkpoint_of: CheckpointOf) -> None:
    path = checkpoint_of("qwen3-windows")
    prompts = random_prompts(3, LENGTHS)
    runner = load(path)
    assert runner.info.sparse_budget == 0
    assert generate(runner, prompts) == generate(load(path, budget=0), prompts)
