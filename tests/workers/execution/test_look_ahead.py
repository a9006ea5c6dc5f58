"""The compiled kernels on a thread of their own, fed their own tokens: the same tokens as in lockstep, bit for bit."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.kernels.cpu.load import library
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.runner import LayerWatch
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import Batch, SampledToken, ScheduledSequence
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.ranks.step_executor import Compute, ThreadExecutor, submit_step

from ...support.checkpoints import random_prompts
from ...support.engines import assert_clean, tokens
from ...support.joining import tokens_of_two
from ...support.sequences import make_sequence

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.9, top_p=0.95, seed=7)


def generate(
    path: Path, samplings: list[SamplingParams], *, look_ahead: bool, every: int = 0, chunk_tokens: int = 48
) -> tuple[list[list[int]], int]:
    """The tokens of each prompt, and the number of steps at whose end another step was running. every: so many steps
    after each request the next one comes; 0: all come in the first."""
    config = WorkerConfig.of(path, kv_memory_bytes=4 << 20, max_context_tokens=512, look_ahead=look_ahead)
    runner = ModelRunner.load(config)
    engine = Engine(runner, SchedulerConfig(chunk_tokens=chunk_tokens, max_batch_tokens=64))
    num_ahead = 0
    prompts = random_prompts(5, [1, 15, 16, 17, 100][: len(samplings)])
    waiting = list(enumerate(zip(prompts, samplings, strict=True)))
    outputs: list[StepOutput] = []
    while waiting or engine.scheduler.has_work or engine.steps:
        while waiting and waiting[0][0] * every <= len(outputs):
            i, (prompt, sampling) = waiting.pop(0)
            engine.submit(f"0/{i}", Request(str(i), tuple(prompt), sampling, 600.0), [])
        outputs.append(engine.step())
        num_ahead += bool(engine.steps)
    assert_clean(engine)
    runner.close()
    return [[e.token_id for e in tokens(outputs, f"0/{i}")] for i in range(len(samplings))], num_ahead


@pytest.mark.skipif(library() is None, reason="the kernels are not built")
def test_tokens_are_those_of_lockstep(llama: Path) -> None:
    samplings = [GREEDY, DRAWN, replace(DRAWN, seed=8, max_tokens=25), GREEDY, replace(DRAWN, top_k=5)]
    expected, _ = generate(llama, samplings, look_ahead=False)
    # Some end by a token while their next step is computed already.
    stopping = [replace(s, stop_token_ids=(row[12],)) for s, row in zip(samplings, expected, strict=True)]
    cut = [row[: row.index(row[12]) + 1] for row in expected]
    for asked, wanted in ((samplings, expected), ([GREEDY], expected[:1]), (stopping, cut)):
        found, num_ahead = generate(llama, asked, look_ahead=True)
        assert found == wanted
        assert num_ahead > 5


@pytest.mark.skipif(library() is None, reason="the kernels are not built")
@pytest.mark.parametrize("every", [1, 3])
def test_prompts_that_come_are_computed_in_steps_that_are_prepared(every: int, llama: Path) -> None:
    samplings = [GREEDY, DRAWN, replace(DRAWN, seed=8, max_tokens=25), GREEDY, replace(DRAWN, top_k=5)]
    expected, _ = generate(llama, samplings, look_ahead=False)
    found, num_ahead = generate(llama, samplings, look_ahead=True, every=every, chunk_tokens=7)
    assert found == expected
    assert num_ahead > 40 + 3 * every


@pytest.mark.skipif(library() is None, reason="the kernels are not built")
def test_what_needs_its_tokens_waits_for_them(llama: Path) -> None:
    samplings = [replace(GREEDY, repetition_penalty=1.5), GREEDY]
    expected, _ = generate(llama, samplings, look_ahead=False)
    assert generate(llama, samplings, look_ahead=True) == (expected, 0)


@pytest.mark.skipif(library() is None, reason="the kernels are not built")
@pytest.mark.parametrize("samplings", [[GREEDY, GREEDY], [DRAWN, GREEDY], [GREEDY, DRAWN]])
def test_a_sequence_that_came_joins_the_step_that_is_prepared(samplings: list[SamplingParams], llama: Path) -> None:
    """One that arrived with its KV: its token is known, that of the other one is not."""
    expected, _ = generate(llama, [*samplings], look_ahead=False)
    config = WorkerConfig.of(llama, kv_memory_bytes=4 << 20, max_context_tokens=512, look_ahead=True)
    runner = ModelRunner.load(config)
    found = tokens_of_two(runner, random_prompts(5, [1, 15]), samplings, 12)
    runner.close()
    assert found == [row[:12] for row in expected]


@pytest.mark.parametrize("is_running", [True, False])
def test_nothing_of_what_was_abandoned_runs(is_running: bool) -> None:
    lane, begun, go_on = ThreadExecutor(None), threading.Event(), threading.Event()
    done: list[str] = []

    def compute() -> list[SampledToken]:
        begun.set()
        go_on.wait()
        done.append("first")
        raise RuntimeError("it went wrong")

    def compute_second() -> list[SampledToken]:
        done.append("second")
        return []

    first, second = submit_step(lane, lambda _: compute, None), submit_step(lane, lambda _: compute_second, None)
    begun.wait()
    if is_running:
        threading.Timer(0.0, go_on.set).start()
        first.abandon()
        assert done[0] == "first"
        assert second.tokens() == []
    else:
        second.abandon()
        go_on.set()
        with pytest.raises(RuntimeError, match="it went wrong"):
            first.tokens()
        assert done == ["first"]
    lane.close()
    lane.close()


@pytest.mark.parametrize("fails", ["not", "in a layer", "in what hears of it"])
def test_what_is_watched_is_computed_there_and_heard_of_here(fails: str) -> None:
    lane, here, there = ThreadExecutor(None), threading.current_thread(), list[threading.Thread]()
    heard: list[int] = []

    def make(watch: LayerWatch | None) -> Compute:
        assert watch is not None

        def compute() -> list[SampledToken]:
            for end in watch.ends:
                watch.reached(end)
                if fails == "in a layer":
                    raise RuntimeError("it went wrong")
            there.append(threading.current_thread())
            return []

        return compute

    def reached(end: int) -> None:
        assert threading.current_thread() is here
        heard.append(end)
        if fails == "in what hears of it":
            raise RuntimeError("it went wrong")

    launched = submit_step(lane, make, LayerWatch((1, 3), reached))
    if fails == "not":
        assert launched.tokens() == []
    else:
        with pytest.raises(RuntimeError, match="it went wrong"):
            launched.tokens()
    assert heard == ([1, 3] if fails == "not" else [1])
    assert (here not in there) and len(there) == (fails != "in a layer")
    lane.close()


@pytest.mark.skipif(library() is None, reason="the kernels are not built")
def test_a_step_that_is_watched_runs_on_the_thread_and_yields_the_same_tokens(llama: Path) -> None:
    config = WorkerConfig.of(llama, kv_memory_bytes=4 << 20, max_context_tokens=512, look_ahead=True)
    runner, heard = ModelRunner.load(config), list[int]()
    num_layers = runner.layout.num_layers
    tokens_of: list[int] = []
    for watch in (None, LayerWatch((1, num_layers), heard.append)):
        sequence = make_sequence(random_prompts(5, [20])[0])
        sequence.block_table = [0, 1]
        (sampled,) = runner.launch(Batch([ScheduledSequence(sequence, 20)]), watch).tokens()
        tokens_of.append(sampled.token_id)
    runner.close()
    assert heard == [1, num_layers]
    assert tokens_of[0] == tokens_of[1]
