"""The CUDA engine on a fake device: the same tokens as eager_steps.py, however late or early the device computes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.workers.common.errors import ConfigError, DeviceLost, InternalError
from diptych.workers.common.request import Request
from diptych.workers.core.runner import LayerWatch
from diptych.workers.core.sequence import Batch, ScheduledSequence, Sequence
from diptych.workers.device.device import Work
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.device.kv_cache import KVCache
from diptych.workers.execution import model_runner
from diptych.workers.execution.gpu.buckets import token_buckets
from diptych.workers.execution.gpu.gpu_loader import check_known
from diptych.workers.execution.gpu.step_buffers import HostBuffers
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.kv.layout import SCALES_LAST
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import LatentSpec, RopeSpec
from diptych.workers.models.layers.attention import StepMeta
from diptych.workers.models.layers.decoder import Decoder

from ....support.checkpoints import untied_prompts
from ....support.gpu.serving import DRAWN, GRAPH_TOKENS, GREEDY, early, generate, late, load, steps_of
from ....support.joining import tokens_of_two

FAMILIES = ["gptoss"]  # windows, sinks, and experts with biases
LENGTHS = [1, 15, 16, 17, 100]
SAMPLINGS = [
    GREEDY,
    DRAWN,
    replace(DRAWN, seed=8, max_tokens=9),
    replace(GREEDY, max_tokens=15),
    replace(DRAWN, top_k=5),
]


def sequence_of(prompt: list[int], num_blocks: int) -> Sequence:
    request = Request("0", tuple(prompt), GREEDY, 600.0)
    return Sequence("0/0", request, list(prompt), len(prompt), 600.0, 0, block_table=list(range(1, num_blocks + 1)))


@pytest.fixture(scope="module")
def prompts(llama: Path) -> list[list[int]]:
    return [prompt for prompt, _ in untied_prompts(llama, seed=5, lengths=LENGTHS, max_tokens=16)]


@pytest.fixture(scope="module")
def expected(llama: Path, prompts: list[list[int]]) -> list[list[int]]:
    return generate(load(llama, None), prompts, SAMPLINGS).token_ids


@pytest.fixture(scope="module", params=[late, early])
def runner(llama: Path, request: pytest.FixtureRequest) -> ModelRunner:
    return load(llama, request.param())


@pytest.mark.parametrize("config", [{}, {"chunk_tokens": 16}, {"max_batch_tokens": 20}])
def test_tokens(runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]], config: Any) -> None:
    run = generate(runner, prompts, SAMPLINGS, **config)
    assert run.token_ids == expected
    assert run.num_ahead > 5
    assert any(batch.previous_entries for batch in run.batches)


@pytest.mark.parametrize("changes", [{}, {"cuda_graphs": False}])
@pytest.mark.parametrize("of", [late, early])
def test_prompts_in_steps_ahead(
    of: Callable[[], FakeDevice],
    changes: dict[str, Any],
    llama: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    """Requests come while others are computed: every step but the first is launched while another is under way."""
    runner, order = load(llama, of(), **changes), [4, 0, 2, 1, 3]
    chosen, samplings = [prompts[i] for i in order], [SAMPLINGS[i] for i in order]
    for config in ({"chunk_tokens": 7}, {"max_batch_tokens": 40}):  # on the prompt lane alone, and beside a graph
        run = generate(runner, chosen, samplings, arrivals=[0, 1, 4, 6, 9], **config)
        assert run.token_ids == [expected[i] for i in order]
        assert sum(not batch.previous_entries for batch in run.batches) == 1
        beside = [b for b in run.batches if b.previous_entries and 0 < b.num_decodes < len(b.entries)]
        assert len(beside) > 2


@pytest.mark.parametrize(
    ("of", "kv_dtype", "changes"),
    [
        (late, "int8", {}),
        (early, "fp8", {}),
        (early, "int8", {"kv_axis_order": "layer"}),
        (late, "fp8", {"cuda_graphs": False, "kv_axis_order": "layer", "block_size": 4}),
    ],
)
def test_kv_of_few_bits(
    of: Callable[[], FakeDevice], kv_dtype: str, changes: dict[str, Any], llama: Path, prompts: list[list[int]]
) -> None:
    """Scales apart from the numbers: the tokens of a pool in host memory, where each is beside its vector."""
    expected = generate(load(llama, None, kv_dtype=kv_dtype), prompts, SAMPLINGS).token_ids
    runner = load(llama, of(), kv_dtype=kv_dtype, **changes)
    assert (runner.layout.dtype, runner.layout.packing) == (kv_dtype, SCALES_LAST)
    for config in ({}, {"chunk_tokens": 16}, {"max_batch_tokens": 20, "arrivals": [3, 0, 2, 9, 5]}):
        assert generate(runner, prompts, SAMPLINGS, **config).token_ids == expected
    both = generate(runner, [prompts[4]] * 2, [DRAWN, replace(DRAWN, seed=8)])  # of one block that is copied
    assert any(batch.copies for batch in both.batches)
    alone = [generate(runner, [prompts[4]], [replace(DRAWN, seed=seed)]).token_ids[0] for seed in (7, 8)]
    assert both.token_ids == alone


@pytest.mark.parametrize("changes", [{}, {"cuda_graphs": False}])
@pytest.mark.parametrize("of", [late, early])
def test_a_sequence_that_came_joins_the_step_that_is_launched_ahead(
    of: Callable[[], FakeDevice],
    changes: dict[str, Any],
    llama: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    """One that arrived with its KV: its token is known, those of the others are not."""
    runner = load(llama, of(), **changes)
    for first, second in ((2, 1), (0, 4)):
        pair = [first, second]
        found = tokens_of_two(runner, [prompts[i] for i in pair], [SAMPLINGS[i] for i in pair], 8)
        assert found == [expected[i][:8] for i in pair]


def test_steps_with_prompts_beside_decodes(
    runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in pieces and, for steps too large for pieces, on a separate lane beside a decode graph."""
    steps = steps_of(runner)
    for largest in (GRAPH_TOKENS, 8):
        monkeypatch.setattr(steps._own.prompts, "_buckets", token_buckets(largest))
        run = generate(runner, prompts, SAMPLINGS, arrivals=[3, 0, 2, 9, 5], chunk_tokens=40)
        assert run.token_ids == expected
        assert any(0 < batch.num_decodes < len(batch.entries) for batch in run.batches)


@pytest.mark.parametrize("arch", FAMILIES)
def test_families(arch: str, checkpoint_of: Callable[[str], Path]) -> None:
    path = checkpoint_of(arch)
    prompts = [prompt for prompt, _ in untied_prompts(path, seed=6, lengths=[1, 17, 60], max_tokens=12)]
    expected = generate(load(path, None), prompts, [GREEDY] * 3).token_ids
    device = late()
    runner = load(path, device)
    run = generate(runner, prompts, [GREEDY] * 3, chunk_tokens=24)
    assert run.token_ids == expected and run.num_ahead > 3
    for _ in range(2):  # the engine has asked before
        runner.expert_tokens()
        device.synchronize()
    computed = sum(map(len, prompts)) + 3 * (GREEDY.max_tokens - 1)
    counts = runner.expert_tokens()
    if counts is None:
        assert load_spec(path).num_experts == 0
    else:
        *before, last = counts.sum(axis=1).tolist()  # where chunks have an end that nobody reads
        assert before == [2 * computed] * (len(load_spec(path).layers) - 1)
        assert 2 * 3 * GREEDY.max_tokens <= last < 2 * computed


class MeasuringDevice(FakeDevice):
    """A device whose memory steps take some of."""

    def peak_bytes(self, work: Work) -> int:
        self.lane("measured").run(work)
        self.synchronize()
        return 8 << 20


@pytest.mark.parametrize(("max_batch_tokens", "num_new"), [(80, [16, 32, 32]), (65, [1, 32, 32])])
def test_what_the_largest_step_takes_is_left_to_it(
    max_batch_tokens: int, num_new: list[int], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of max_batch_tokens is computed before KV gets its part: here of more sequences than one."""
    monkeypatch.setattr(model_runner, "available_bytes", lambda _: 12 << 20)
    forward, sizes = Decoder.forward, list[tuple[list[int], list[int]]]()

    def spied(self: Decoder, token_ids: Tensor, cache: KVCache, meta: StepMeta, *taken: Any) -> Tensor:
        if cache.num_blocks == 1:
            sizes.append((meta.paged.host_num_new, meta.paged.context_lens.tolist()))
            assert int(meta.slots.max()) < 0, "it stores KV"
        return forward(self, token_ids, cache, meta, *taken)

    monkeypatch.setattr(Decoder, "forward", spied)
    changes = {"kv_memory_bytes": None, "kv_memory_fraction": 0.5, "max_context_tokens": 32}
    changes["max_batch_tokens"] = max_batch_tokens
    plain, measured = (load(llama, device, **changes) for device in (early(), MeasuringDevice(is_late=False)))
    assert sizes == [(num_new, [32, 32, 32])], "at the end of the longest contexts"
    expected = [num_bytes // plain.layout.block_bytes for num_bytes in (6 << 20, 2 << 20)]
    assert [of.memory.num_blocks for of in (plain, measured)] == expected


def test_what_the_kernels_do_not_know_is_refused(llama: Path) -> None:
    spec = load_spec(llama)
    odd = replace(spec.layers[0], attention=LatentSpec(8, 0, 32, 16, 8, 16, RopeSpec(), 0.2))
    with pytest.raises(ConfigError, match="does not support latents and heads of sizes"):
        check_known(replace(spec, layers=(*spec.layers[1:], odd)))


def test_prompts_beside_a_decode_graph_use_no_graph_of_theirs(
    llama: Path, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All graphs share one pool of memory, and only one of them may run at a time."""
    runner = load(llama, early())
    prompt_part = steps_of(runner)._own.prompts
    monkeypatch.setattr(prompt_part, "_buckets", token_buckets(8))
    compute, run = prompt_part.compute, prompt_part.run
    beside = list[bool]()
    found: dict[bool, set[int | None]] = {True: set(), False: set()}

    def spied(*args: Any, is_alone: bool = True, **rest: Any) -> Any:
        beside.append(not is_alone)
        return run(*args, is_alone=is_alone, **rest)

    def computed(buffers: Any, bucket: int | None, index: int) -> Any:
        found[beside[-1]].add(bucket)
        return compute(buffers, bucket, index)

    monkeypatch.setattr(prompt_part, "run", spied)
    monkeypatch.setattr(prompt_part, "compute", computed)
    tokens = generate(runner, prompts, SAMPLINGS, arrivals=[3, 0, 2, 9, 5], chunk_tokens=7).token_ids
    assert tokens == expected
    assert found[True] == {None} and 8 in found[False]


def test_without_graphs(llama: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    device = FakeDevice()
    run = generate(load(llama, device, cuda_graphs=False), prompts, SAMPLINGS, arrivals=[0, 1, 2, 3, 4])
    assert (run.token_ids, device.num_captured) == (expected, 0)
    assert run.num_ahead > 5


def test_decodes_are_graphs(runner: ModelRunner, prompts: list[list[int]]) -> None:
    """One from tokens to logits and one that samples; who ends leaves an idle row."""
    steps, sizes = steps_of(runner), list[int]()
    forward = steps._own.graphs.forward

    def spied(bucket: int, max_queries: int, is_sparse: bool) -> None:
        assert max_queries == 1 and not is_sparse
        sizes.append(bucket)
        forward(bucket, max_queries, is_sparse)

    steps._own.graphs.forward = spied
    samplings = [replace(GREEDY, max_tokens=n) for n in (4, 8, 12, 12, 12)]
    generate(runner, prompts, samplings)
    steps._own.graphs.forward = forward
    assert sizes == [6] * 3 + [4] * 4 + [4] * 4  # 5, 4 and 3 rows


def test_rows_that_are_not_plain(llama: Path, runner: ModelRunner, prompts: list[list[int]]) -> None:
    samplings = [
        replace(GREEDY, repetition_penalty=1.5, logprobs=2),
        replace(DRAWN, presence_penalty=0.5, logit_bias={3: 5.0}),
        GREEDY,
    ]
    wanted = generate(load(llama, None), prompts[:3], samplings)
    found = generate(runner, prompts[:3], samplings)
    assert found.token_ids == wanted.token_ids and found.num_ahead > 5
    for one, other in zip(found.logprobs[0], wanted.logprobs[0], strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_a_prompt_that_others_share_is_copied_on_the_device(llama: Path, prompts: list[list[int]]) -> None:
    wanted = generate(load(llama, None), [prompts[4]] * 3, [DRAWN] * 3)
    found = generate(load(llama, late(), kv_axis_order="layer"), [prompts[4]] * 3, [DRAWN] * 3)
    assert found.token_ids == wanted.token_ids
    assert any(batch.copies for batch in found.batches)


def test_a_room_that_is_written_too_early_gives_wrong_tokens(
    llama: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """A planted bug: one host buffer for all steps, without waiting. The fake device must detect this."""
    runner = load(llama, late())
    buffers = steps_of(runner)._own.buffers
    buffers.host[1] = _Careless(buffers.host[0].columns, buffers.host[0].tokens)
    buffers.host[0] = buffers.host[1]
    with pytest.raises((AssertionError, InternalError)):
        assert generate(runner, prompts, SAMPLINGS).token_ids == expected


class _Careless(HostBuffers):
    def write(self, *args: Any) -> None:
        self.used = None
        super().write(*args)


def test_a_watch_is_told_in_order_once_layers_are_stored(llama: Path, prompts: list[list[int]]) -> None:
    runner = load(llama, late())
    told: list[tuple[int, bool]] = []
    sequence = sequence_of(prompts[4], num_blocks=7)

    def reached(end: int) -> None:
        stored = runner._cache.layer(end - 1)[sequence.block_table[6], 0, 3]
        told.append((end, bool(stored.any())))

    batch = Batch([ScheduledSequence(sequence, 100)])
    launched = runner.launch(batch, LayerWatch([1, 2], reached))
    assert told == []
    assert len(launched.tokens()) == 1
    assert told == [(1, True), (2, True)]


def test_what_is_abandoned_is_over(llama: Path, prompts: list[list[int]]) -> None:
    device = FakeDevice()
    runner = load(llama, device)
    sequence = sequence_of(prompts[1], num_blocks=2)
    first = runner.launch(Batch([ScheduledSequence(sequence, 15)]))
    fed = runner.launch(Batch([ScheduledSequence(sequence, 1)], 1, previous_entries=[0]))
    fed.abandon()
    first.abandon()
    assert all(not lane._queue or lane.name != "main" for lane in device.lanes)


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), DeviceLost),
        (RuntimeError("a bug of ours"), RuntimeError),
    ],
)
def test_what_goes_wrong_on_the_device_has_a_name(
    llama: Path, prompts: list[list[int]], error: Exception, named: type[Exception]
) -> None:
    runner = load(llama, late())
    sequence = sequence_of(prompts[1], num_blocks=2)

    def fail(bucket: int, max_queries: int, is_sparse: bool) -> None:
        raise error

    launched = runner.launch(Batch([ScheduledSequence(sequence, 15)]))
    steps_of(runner)._own.graphs.forward = fail
    fed = runner.launch(Batch([ScheduledSequence(sequence, 1)], 1, previous_entries=[0]))
    assert len(launched.tokens()) == 1
    with pytest.raises(named):
        fed.tokens()


def test_more_sequences_than_there_are_buffers_for_are_refused(llama: Path, prompts: list[list[int]]) -> None:
    runner = load(llama, late(), max_running=2, cuda_graphs=False)
    entries = [ScheduledSequence(sequence_of(prompts[0], 1), 1) for _ in range(3)]
    with pytest.raises(InternalError, match="max_running"):
        runner.launch(Batch(entries))
