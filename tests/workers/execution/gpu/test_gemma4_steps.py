"""Gemma 4 on the CUDA engine, on a fake device: transformers' tokens, in graphs and without, in any batch."""

from typing import Any

import pytest

from diptych.workers.core.runner import LayerWatch
from diptych.workers.core.sequence import Batch, ScheduledSequence, Sequence
from diptych.workers.execution.gpu.forward import ForwardBuffers, ForwardPieces
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.kv.bridge import Bridge
from diptych.workers.kv.device_kv import Staged
from diptych.workers.kv.segment import Segment
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.layers.turns import InTurns

from ....support.gpu.serving import (
    ALL_SORTS_OF_STEPS,
    GREEDY,
    Cases,
    assert_tokens,
    cases_of,
    early,
    generate,
    late,
    load,
)
from ...conftest import CheckpointOf
from .test_gpu_steps import sequence_of

# Layers that read other layers' KV, per-token inputs, experts beside an MLP, keys that are also values.
ARCHS = ["gemma4", "gemma4-moe", "gemma4-unified"]


@pytest.fixture(scope="module", params=ARCHS)
def cases(checkpoint_of: CheckpointOf, request: pytest.FixtureRequest) -> Cases:
    return cases_of(checkpoint_of(request.param))


@pytest.fixture(scope="module")
def runner(cases: Cases) -> ModelRunner:
    return load(cases[0], late())


@pytest.mark.parametrize(
    "config", [ALL_SORTS_OF_STEPS[0], *(pytest.param(c, marks=pytest.mark.long) for c in ALL_SORTS_OF_STEPS[1:])]
)
def test_tokens(runner: ModelRunner, cases: Cases, config: dict[str, Any]) -> None:
    assert_tokens(runner, cases, config)


def test_without_graphs(cases: Cases) -> None:
    path, prompts, expected = cases
    device = early()
    runner = load(path, device, cuda_graphs=False, kv_axis_order="layer")
    run = generate(runner, [*prompts, prompts[3]], [GREEDY] * 5, arrivals=[0, 1, 1, 2, 2], chunk_tokens=24)
    assert run.token_ids == [*expected, expected[3]] and run.num_ahead > 5 and not device.num_captured


def copy_kv(source: ModelRunner, blocks: list[int], sink: ModelRunner, table: list[int]) -> None:
    """As a hand-off that is staged."""
    theirs, ours = source.memory, sink.memory
    assert theirs.device is not None
    bridge = Bridge(ours, theirs.layout, theirs.num_blocks)
    segment = Segment(0, tuple(blocks), (1,) * len(blocks), 0, theirs.layout.num_layers)
    for part in bridge.parts(segment, whole_blocks=False):
        data = theirs.device.read(theirs.runs(part.block_ids, part.first_layer, part.num_layers))
        if ours.device is None:
            bridge.convert(memoryview(data), part, table, 0)
        else:
            ours.device.staging.view[: len(data)] = data
            ours.device.convert(bridge, Staged(part, 0, len(data), is_on_device=False), table, 0)


def next_token(runner: ModelRunner, sequence: Sequence, watch: LayerWatch | None = None) -> int:
    batch = Batch([ScheduledSequence(sequence, sequence.num_uncomputed)])
    [sampled] = runner.launch(batch, watch).tokens()
    return sampled.token_id


def test_a_prompt_is_gone_on_with_elsewhere(runner: ModelRunner, cases: Cases) -> None:
    """Told of all layers that keep KV, and handed off to another device's pool and to a CPU's."""
    path, prompts, expected = cases
    (prompt, (first, second, *_)), told = (prompts[3], expected[3]), list[int]()
    sequence, ends = sequence_of(prompt, num_blocks=7), range(1, runner.layout.num_layers + 1)
    assert next_token(runner, sequence, LayerWatch(ends, told.append)) == first
    assert told == list(ends)
    for sink in (load(path, late(), kv_axis_order="layer", block_size=32, cuda_graphs=False), load(path, None)):
        goes_on = sequence_of([*prompt, first], num_blocks=sink.layout.num_blocks_for(len(prompt) + 1))
        goes_on.num_computed = len(prompt)
        goes_on.block_table.reverse()
        copy_kv(runner, sequence.block_table, sink, goes_on.block_table)
        assert next_token(sink, goes_on) == second


def test_what_is_sampled_is_computed_alone_once_the_last_layer_has_stored_its_kv(
    runner: ModelRunner, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a chunk before a prompt's end nothing."""
    path, prompts, expected = cases
    compute, seen = ForwardPieces.compute_in_turns, list[tuple[int, int]]()

    def spied(self: ForwardPieces, buffers: ForwardBuffers, index: int) -> InTurns[None]:
        seen.append((index, len(buffers.slots)))
        return compute(self, buffers, index)

    monkeypatch.setattr(ForwardPieces, "compute_in_turns", spied)
    kept = [layer.kv_from is None for layer in load_spec(path).layers]
    num_kept, num_layers, sequence = sum(kept), len(kept), sequence_of(prompts[3], num_blocks=7)
    assert runner.launch(Batch([ScheduledSequence(sequence, 60)])).tokens() == []
    assert seen == [(index, 60) for index in range(num_kept)]
    sequence.num_computed = 60
    seen.clear()
    assert next_token(runner, sequence) == expected[3][0]
    assert seen == [(index, 40 if index < num_kept else 1) for index in range(num_layers + 1)]
