"""Workers whose ranks have a device each: real processes, fake devices."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from diptych.workers.common.errors import InternalError, PeerLost, RankLost
from diptych.workers.common.exit_codes import UNAVAILABLE
from diptych.workers.core.sequence import Batch, ScheduledSequence
from diptych.workers.execution.common import sum_choice
from diptych.workers.execution.common.timed_choice import NUM_RUNS, Contest, Timed, Work
from diptych.workers.models.families.registry import load_spec
from diptych.workers.parallel.groups import GlooGroup
from diptych.workers.parallel.symmetric_sums import MULTICAST, ONE_SHOT, SumMethod
from diptych.workers.ranks import rank_processes

from ..support.checkpoints import make_checkpoint, random_prompts, untied_prompts
from ..support.drafters import KnowingDrafter, of_outputs
from ..support.gpu import fake_symmetric_memory
from ..support.gpu.fake_symmetric_memory import ranks_with_memory
from ..support.gpu.serving import DRAWN, GREEDY, Run, generate, load
from ..support.harness import assert_nothing_leaked, unlike_workers
from ..workers.execution.gpu.test_gpu_steps import sequence_of
from ..workers.execution.test_drafts import SAMPLINGS, ids
from ..workers.execution.test_drafts import generate as generate_with_drafts
from .test_tensor_parallel import FLAGS, NUM_TOKENS, assert_ended, assert_kv_moves, killed_midway, ranks_of

END_S = 20.0  # for a process that must end; generous, and no test passes by waiting
RANK = "diptych.workers.execution.rank"  # other tests leave children of other kinds to this process
ON_DEVICES = {"device": "fake", "tensor_parallel": 2, "max_running": 8}

pytestmark = pytest.mark.e2e


def test_kv_moves_to_and_from_ranks_on_devices_and_one_that_is_killed_ends_all(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "gemma4", "gemma4", seed=6)
    cases = untied_prompts(path, seed=31, lengths=(1, 17, 130), max_tokens=NUM_TOKENS)
    with unlike_workers(path, [("mixed", FLAGS | ON_DEVICES), ("mixed", FLAGS)]) as [devices, one]:
        assert_kv_moves(devices, one, cases, "grpc")
        assert_kv_moves(one, devices, cases, "grpc")
        ranks = ranks_of(devices)
        asyncio.run(killed_midway(devices, one, ranks, cases))
        assert devices.process.wait(END_S) == UNAVAILABLE
        assert_ended(ranks)


def test_kv_moves_between_the_devices_of_ranks_by_agents_of_their_own(tmp_path: Path) -> None:
    """Over NIXL: of as many ranks each reads what its counterpart has; else the first one reads for all."""
    path = make_checkpoint(tmp_path / "llama", "llama", seed=6, num_key_value_heads=4)
    cases = untied_prompts(path, seed=31, lengths=(1, 17, 130), max_tokens=NUM_TOKENS)
    workers = [("mixed", FLAGS | ON_DEVICES | {"transports": "nixl", "tensor_parallel": n}) for n in (1, 2, 2, 4)]
    with unlike_workers(path, workers) as [one, two, other, four]:
        for source, sink in ((two, other), (one, four), (four, two), (other, one)):
            assert_kv_moves(source, sink, cases, "nixl")
        assert_nothing_leaked([one, two, other, four])
        ranks = ranks_of(two)
        asyncio.run(killed_midway(two, other, ranks, cases))
        assert two.process.wait(END_S) == UNAVAILABLE
        assert_ended(ranks)
        assert_kv_moves(one, other, cases, "nixl")
        assert_nothing_leaked([one, other, four])


def test_kv_of_few_bits_moves_to_and_from_ranks_on_devices(tmp_path: Path) -> None:
    """From and to one rank on CPU, which packs it otherwise: tokens of an engine on CPU, of as many bits."""
    path, few_bits = make_checkpoint(tmp_path / "llama", "llama", seed=6), {"kv_dtype": "int8"}
    prompts = [prompt for prompt, _ in untied_prompts(path, seed=31, lengths=(1, 17, 130), max_tokens=NUM_TOKENS)]
    runner = load(path, None, **few_bits)
    greedy = [replace(GREEDY, max_tokens=NUM_TOKENS)] * len(prompts)
    cases = list(zip(prompts, generate(runner, prompts, greedy).token_ids, strict=True))
    workers = [("mixed", FLAGS | ON_DEVICES | few_bits), ("mixed", FLAGS | few_bits)]
    with unlike_workers(path, workers) as [devices, one]:
        assert_kv_moves(devices, one, cases, "grpc")
        assert_kv_moves(one, devices, cases, "grpc")


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("gemma4-moe", {"expert_parallel": 2}),
        ("llama", {"quantize": "int8", "cuda_graphs": False}),
        ("llama", {"kv_dtype": "int8", "kv_axis_order": "layer"}),
    ],
)
def test_tokens_of_ranks_on_devices(arch: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """The same as ranks on CPU: rows that change their logits, prompts beside decodes, block copies."""
    path = make_checkpoint(tmp_path / arch, arch, seed=3)
    prompts = [prompt for prompt, _ in untied_prompts(path, seed=5, lengths=(1, 15, 60), max_tokens=12)]
    prompts.append(prompts[-1])
    samplings = [GREEDY, DRAWN, replace(DRAWN, seed=8, frequency_penalty=0.5, logprobs=2), GREEDY]
    runs, num_threads = list[Run](), torch.get_num_threads()
    for device in ("cpu", "fake"):
        runner = load(path, None, device=device, tensor_parallel=2, **changes)
        try:
            if device == "fake":  # ranks have not heard of it, and miss nothing
                with pytest.raises(InternalError, match="the buffers hold max_running"):
                    runner.launch(Batch([ScheduledSequence(sequence_of([1], 1), 1)] * 7))
            runs.append(generate(runner, prompts, samplings, arrivals=[3, 0, 2, 2], chunk_tokens=24))
        finally:
            runner.close()
            torch.set_num_threads(num_threads)
    assert runs[0].token_ids == runs[1].token_ids
    logprobs = [[0.0 if each is None else each for of in run.logprobs for each in of] for run in runs]
    assert any(logprobs[0]) and logprobs[1] == pytest.approx(logprobs[0], abs=1e-4)
    assert any(batch.copies for batch in runs[1].batches)


@pytest.mark.parametrize("changes", [{}, {"cuda_graphs": False}])
def test_ranks_on_devices_verify_drafts(changes: dict[str, Any], tmp_path: Path) -> None:
    """Tokens of one rank on CPU without drafts: in graphs, on the prompt lane, beside chunks of prompts."""
    path = make_checkpoint(tmp_path / "llama", "llama", seed=3)
    samplings, num_threads = list(SAMPLINGS.values()), torch.get_num_threads()
    plain = ids(generate_with_drafts(load(path, None, max_running=8), samplings))
    runner = load(path, None, device="fake", tensor_parallel=2, max_running=4, speculation="ngram", **changes)
    try:
        drafter = KnowingDrafter(0.8, 5, of_outputs(plain))
        assert ids(generate_with_drafts(runner, samplings, drafter, chunk_tokens=40, max_running=4)) == plain
        assert drafter.counts["accepted"] > 20
    finally:
        runner.close()
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("changes", [pytest.param({}, marks=pytest.mark.long), {"cuda_graphs": False}])
def test_ranks_on_devices_decode_sparsely(changes: dict[str, Any], tmp_path: Path) -> None:
    """Tokens of one rank on CPU: each rank chooses for its own KV heads, in graphs and on the prompt lane."""
    path = make_checkpoint(tmp_path / "llama", "llama", seed=5, num_hidden_layers=5)
    prompts, samplings, num_threads = random_prompts(3, (5, 64, 100, 150)), [GREEDY] * 4, torch.get_num_threads()
    sparse = {"sparse_attention": "quest", "sparse_budget_tokens": 64}
    expected = generate(load(path, None, **sparse), prompts, samplings).token_ids
    assert expected != generate(load(path, None), prompts, samplings).token_ids
    runner = load(path, None, device="fake", tensor_parallel=2, max_running=4, **sparse, **changes)
    try:
        run = generate(runner, prompts, samplings, arrivals=[0, 2, 0, 5], chunk_tokens=40, max_running=4)
        assert run.token_ids == expected
    finally:
        runner.close()
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize(
    ("num_ranks", "method", "changes"),
    [(2, ONE_SHOT, {}), pytest.param(4, MULTICAST, {"cuda_graphs": False}, marks=pytest.mark.long)],
)
def test_ranks_on_devices_add_up_in_symmetric_memory(
    num_ranks: int, method: SumMethod, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of one rank on CPU. All ranks add up by what rank 0 has chosen, or the first step would not end."""
    path = make_checkpoint(tmp_path / "llama", "llama", seed=6, num_key_value_heads=4)
    prompts = [prompt for prompt, _ in untied_prompts(path, seed=31, lengths=(1, 17, 60), max_tokens=12)]
    expected = generate(load(path, None), prompts, [GREEDY] * 3).token_ids

    def fastest(contest: Contest, own: Work, others: Any, timed: Timed) -> Any:
        for work in (own, *(work for _, work in others)):
            for _ in range(1 + NUM_RUNS):
                timed(work)
        return method

    monkeypatch.setattr(sum_choice, "fastest", fastest)
    num_threads = torch.get_num_threads()
    with ranks_with_memory() as memory:
        runner = load(path, None, device="fake", tensor_parallel=num_ranks, **changes)
        try:
            memory.calls.clear()
            run = generate(runner, prompts, [GREEDY] * 3, arrivals=[2, 0, 3], chunk_tokens=24)
        finally:
            runner.close()
            torch.set_num_threads(num_threads)
    assert run.token_ids == expected
    row_bytes = 4 * load_spec(path).hidden_size
    assert {num_bytes // row_bytes for _, num_bytes in memory.calls} >= {1, 2}  # decodes
    assert {op for op, _ in memory.calls} == {method.op}


def test_a_rank_that_is_killed_while_a_kernel_waits_for_it_in_symmetric_memory_ends_the_worker(tmp_path: Path) -> None:
    """Nothing but the end of its process ends such a kernel, nor the thread that waits for the device."""
    path = make_checkpoint(tmp_path / "llama", "llama", seed=6)
    command = [sys.executable, "-m", fake_symmetric_memory.__name__, "lose-a-rank", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=6 * END_S)
    assert run.returncode == UNAVAILABLE, run.stderr
    assert "a kernel waits" in run.stdout and "rank 1 was killed by SIGKILL" in run.stderr
    assert "the GPU waits for a rank that is lost, and cannot be told: the process ends" in run.stderr


@pytest.fixture
def left() -> Iterator[threading.Event]:
    """Set the number of threads at the end to that of before."""
    num_threads, event = torch.get_num_threads(), threading.Event()
    yield event
    event.set()
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_rank_that_is_killed_before_all_have_joined_ends_the_load(
    is_told: bool, tmp_path: Path, left: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for the lost rank may wait for ever, or get an error without the reason."""

    def join(*_: object) -> None:
        [rank] = [child for child in psutil.Process().children() if RANK in child.cmdline()]
        rank.kill()
        if is_told:
            raise PeerLost("somebody is gone")
        left.wait()

    monkeypatch.setattr(GlooGroup, "join", join)
    with pytest.raises(RankLost, match="rank 1 was killed by SIGKILL: all 2 ranks of the worker end with it"):
        load(make_checkpoint(tmp_path / "llama", "llama", seed=3), None, tensor_parallel=2)


def test_ranks_that_do_not_come_to_an_end_are_ended(
    tmp_path: Path, left: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "STALL", timedelta(seconds=0.1))
    monkeypatch.setattr(GlooGroup, "join", lambda *_: left.wait())
    with pytest.raises(RankLost, match="what the ranks do together has not ended within 0 s: all 2 ranks"):
        load(make_checkpoint(tmp_path / "llama", "llama", seed=3), None, tensor_parallel=2)
