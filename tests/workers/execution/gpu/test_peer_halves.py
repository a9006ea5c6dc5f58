"""Workers that share experts on devices compute large steps in halves: what whole ones give, in one order of exchanges
on all workers."""

import os
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from diptych.kernels.common.untried import VARIABLE
from diptych.workers.common.errors import ConfigError, RankLost
from diptych.workers.core.runner import LayerWatch
from diptych.workers.core.sequence import Batch, ScheduledSequence
from diptych.workers.core.sequence import Sequence as Seq
from diptych.workers.device.cuda_device import CudaDevice
from diptych.workers.device.device import Device
from diptych.workers.execution import model_runner
from diptych.workers.execution.common.halves import OVERLAPPED, Halves
from diptych.workers.execution.gpu import rank_steps
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.layers import row_exchange
from diptych.workers.models.layers.decoder import Decoder
from diptych.workers.models.layers.row_exchange import RowExchange

from ....support.checkpoints import make_checkpoint, random_prompts
from ....support.gpu.peers import PeerRunner, lone_peer, peers, together
from ....support.gpu.serving import ALL_SORTS_OF_STEPS, GREEDY, cases_of, early, generate, late, load
from ...conftest import CheckpointOf
from .test_gpu_steps import sequence_of

ROOT = Path(__file__).parents[4]
LEAST_ROWS = 12
PathOf = Callable[[str], Path]


@pytest.fixture
def path_of(checkpoint_of: CheckpointOf, latent_of: CheckpointOf) -> PathOf:
    return lambda arch: (latent_of if arch.startswith("deepseek") else checkpoint_of)(arch)


@contextmanager
def in_halves(monkeypatch: pytest.MonkeyPatch) -> Generator[list[int]]:
    """Compute all but small steps in halves. Yields the rows of each half that was launched."""
    rows, run = list[int](), Halves.run

    def spied(of: Halves, *given: Any) -> None:
        rows.append(of.num_rows)
        run(of, *given)

    with monkeypatch.context() as patched:
        patched.setenv(VARIABLE, OVERLAPPED)
        patched.setattr(rank_steps, "least_rows", lambda _: LEAST_ROWS)
        patched.setattr(Halves, "run", spied)
        yield rows


def answers(of: PeerRunner, prompts: Sequence[list[int]], **config: Any) -> tuple[list[list[int]], list[float | None]]:
    """Tokens, and their log-probabilities."""
    samplings = [replace(GREEDY, logprobs=2, prompt_logprobs=1), *[replace(GREEDY, logprobs=2)] * (len(prompts) - 1)]
    found = generate(of.runner, prompts, samplings, **config)
    of.runner.check()
    return found.token_ids, [of for each in found.logprobs for of in each]


LOADS: list[tuple[list[int], dict[str, Any]]] = [
    ([3, 2, 1, 0], {"chunk_tokens": 40, "arrivals": [0, 0, 2, 3]}),
    ([0, 3], {"max_batch_tokens": 37, "arrivals": [0, 1]}),
]


@pytest.mark.parametrize("most", [row_exchange.MOST_ROWS, 24])
@pytest.mark.parametrize("arch", ["mixtral", "qwen3moe", "deepseek-v3"])
def test_halves_of_two_workers(path_of: PathOf, tmp_path: Path, arch: str, most: int, monkeypatch: Any) -> None:
    """One prefills beside one that decodes, and one that is idle now and then; exchanges are of one piece, or more."""
    path, prompts, expected = cases_of(path_of(arch))
    monkeypatch.setattr(row_exchange, "MOST_ROWS", most)
    exchanged: dict[int, list[tuple[str, int]]] = {0: [], 1: []}
    gathered, summed = RowExchange._gathered, RowExchange._summed

    def spied_gather(of: RowExchange, message: Tensor, *rest: Any) -> Tensor:
        exchanged[of.rank].append(("gather", len(message)))
        return gathered(of, message, *rest)

    def spied_sum(of: RowExchange, given: Tensor) -> Tensor:
        exchanged[of.rank].append(("scatter", len(given)))
        return summed(of, given)

    def work(of: PeerRunner, load: tuple[list[int], dict[str, Any]]) -> tuple[list[list[int]], list[float | None]]:
        return answers(of, [prompts[i] for i in load[0]], **load[1])

    with peers(path, tmp_path) as made:
        whole = together(work, made, LOADS)
    with in_halves(monkeypatch) as rows, peers(path, tmp_path) as made:
        monkeypatch.setattr(RowExchange, "_gathered", spied_gather)
        monkeypatch.setattr(RowExchange, "_summed", spied_sum)
        found = [*together(work, made, LOADS), work(made[0], LOADS[0])]
    for (tokens, logprobs), (of_whole, expected_logprobs), (chosen, _) in zip(
        found, [*whole, whole[0]], [*LOADS, LOADS[0]], strict=True
    ):
        assert tokens == of_whole == [expected[i] for i in chosen]
        assert logprobs == pytest.approx(
            expected_logprobs, abs=1e-5
        )  # torch's products depend on how many rows there are
    assert len(rows) > 20 and len(set(rows)) > 3
    assert exchanged[0] == exchanged[1]


def test_halves_fill_blocks_of_a_kv_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path / "wide", "mixtral", seed=9, head_dim=32)
    prompts, kivi = random_prompts(3, [1, 40, 70, 33]), {"kv_dtype": "kivi", "block_size": 32}
    expected = generate(load(path, None, **kivi), prompts, [GREEDY] * len(prompts)).token_ids
    with in_halves(monkeypatch) as rows, peers(path, tmp_path, **kivi) as made:
        chunks: list[dict[str, Any]] = [{}, {"chunk_tokens": 33}]
        found = together(lambda of, config: answers(of, prompts, **config)[0], made, chunks)
    assert found == [expected] * 2
    assert len(rows) > 2


Computed = tuple[Tensor, Tensor, list[int]]


def computed(runner: ModelRunner, batches: Sequence[Batch], told: list[int] | None = None) -> Computed:
    """KV, final hidden states of sampled rows, and tokens."""
    hidden, tokens = list[Tensor](), list[int]()
    logits = Decoder.whole_logits

    def spied(decoder: Decoder, rows: Tensor) -> Tensor | None:
        hidden.append(rows.clone())
        return logits(decoder, rows)

    watch = None if told is None else LayerWatch(range(1, runner.layout.num_layers + 1), told.append)
    with patch.object(Decoder, "whole_logits", spied):
        for batch in batches:
            tokens += [token.token_id for token in runner.launch(batch, watch).tokens()]
            for entry in batch.entries:
                entry.sequence.num_computed += entry.num_new
    found = runner._cache.tensor.clone(), torch.cat(hidden), tokens
    runner._cache.tensor.zero_()
    return found


def on_a_gpu() -> Device:
    return CudaDevice(torch.device("cuda"))


NEEDS_A_GPU = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("make", [late, early, pytest.param(on_a_gpu, marks=NEEDS_A_GPU)])
@pytest.mark.parametrize("arch", ["mixtral", "qwen3moe", "deepseek-v3"])
def test_halves_have_the_bits_of_two_steps(
    path_of: PathOf, monkeypatch: pytest.MonkeyPatch, arch: str, make: Callable[[], Device]
) -> None:
    """Cut between two sequences, and within one; a hand-off is told of layers in order."""
    path, prompts, _ = cases_of(path_of(arch))
    ids = prompts[3][:80]

    def sequences(*pieces: list[int]) -> list[Seq]:
        made: list[Seq] = []
        for i, piece in enumerate(pieces):
            made.append(sequence_of(piece, num_blocks=5))
            made[-1].key, made[-1].block_table = f"0/{i}", [*range(1 + 5 * i, 6 + 5 * i)]
        return made

    with lone_peer() as shared:
        runner = load(path, make(), cuda_graphs=False, **shared)
        one, other = sequences(ids[:40], ids[40:])
        apart = computed(runner, [Batch([ScheduledSequence(of, 40)]) for of in (one, other)])
        [long] = sequences(ids)
        in_chunks = computed(runner, [Batch([ScheduledSequence(long, 40)])] * 2)
        runner.close()
    with in_halves(monkeypatch) as rows, lone_peer() as shared:
        runner, told = load(path, make(), cuda_graphs=False, **shared), list[int]()
        both = Batch([ScheduledSequence(of, 40) for of in sequences(ids[:40], ids[40:])])
        assert_equal(computed(runner, [both], told), apart)
        assert told == [*range(1, runner.layout.num_layers + 1)]
        whole = Batch([ScheduledSequence(of, 80) for of in sequences(ids)])
        assert_equal(computed(runner, [whole]), in_chunks)
        assert rows
        runner.close()


def assert_equal(found: Computed, expected: Computed) -> None:
    assert torch.equal(found[0], expected[0]) and expected[0].any()
    assert torch.equal(found[1], expected[1])
    assert found[2] == expected[2]


@pytest.mark.parametrize("changes", [{}, {"cuda_graphs": False}])
def test_what_is_launched_is_in_order(
    path_of: PathOf, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """However late a device computes, and whatever steps the others have."""
    path, prompts, _ = cases_of(path_of("mixtral"))
    found: list[list[list[int]]] = []
    with in_halves(monkeypatch) as rows:
        for device in (early(), late()):
            with lone_peer() as shared:
                runner = load(path, device, **shared, **changes)
                for config in ALL_SORTS_OF_STEPS:
                    found.append(generate(runner, prompts, [GREEDY] * len(prompts), **config).token_ids)
                    runner.check()
                runner.close()
    assert all(tokens == found[0] for tokens in found)
    assert len(rows) > 20


def test_sparse_decodes_beside_prompts_in_halves(
    path_of: PathOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each half its own sequences are sparse."""
    path, prompts, _ = cases_of(path_of("qwen3moe"))
    settings, config = {"sparse_attention": "quest", "sparse_budget_tokens": 64}, {"arrivals": [0, 2, 4, 6]}
    prompts = [prompts[3], prompts[3][:90], prompts[3][:80], prompts[3][:70]]
    expected = generate(load(path, None, **settings), prompts, [GREEDY] * 4, **config).token_ids
    with in_halves(monkeypatch) as rows, peers(path, tmp_path, **settings) as made:
        found = together(lambda of: answers(of, prompts, **config)[0], made)
    assert found == [expected] * 2
    assert len(rows) > 5


def test_who_computes_no_halves_is_refused(path_of: PathOf, tmp_path: Path) -> None:
    each, path = iter([True, False]), path_of("mixtral")
    what = r"shares other experts .*large steps in halves.* start all with the same settings"
    with (
        patch.object(model_runner, "are_wanted", lambda: next(each)),
        pytest.raises(ConfigError, match=what),
        peers(path, tmp_path),
    ):
        pass


@pytest.mark.parametrize("exchange", ["_gathered", "_summed"])
def test_one_that_fails_in_a_half_ends_all(
    path_of: PathOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: str
) -> None:
    """Its device is lost before an exchange of the second half, in which the other waits."""
    path, prompts, _ = cases_of(path_of("mixtral"))
    call, num_calls = getattr(RowExchange, exchange), 0
    with in_halves(monkeypatch) as rows, peers(path, tmp_path) as [first, second]:

        def lost(of: RowExchange, *given: Any) -> Tensor:
            nonlocal num_calls
            num_calls += of.rank == 0
            if of.rank == 0 and num_calls == 2:
                first.device.is_lost = True
                first.device.check()
            return call(of, *given)

        monkeypatch.setattr(RowExchange, exchange, lost)

        def ends(of: PeerRunner) -> str:
            with pytest.raises(RankLost) as error:
                generate(of.runner, prompts[3:], [GREEDY])
            of.runner.close()  # as its worker does
            return f"{type(error.value).__name__}: {error.value}"

        one, other = together(ends, [first, second])
        assert one.startswith("DeviceLost") and "unspecified launch failure" in one
        assert other.startswith("PeerLost") and "that share experts ended" in other
        assert rows
        first.device.is_lost = False  # to be closed


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_halves_have_the_bits_of_a_whole_step_by_interpreted_kernels(tmp_path: Path) -> None:
    """Whose products do not depend on how many rows there are, unlike torch's."""
    path = make_checkpoint(tmp_path / "mixtral", "mixtral", seed=21, num_hidden_layers=2)
    code = "import triton; from tests.workers.execution.gpu import test_peer_halves as t; "
    env = os.environ | {"TRITON_INTERPRET": "1", "DIPTYCH_TRITON": "interpret", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", f"{code}t.interpreted({str(path)!r})"], check=True, env=env, cwd=ROOT)


def interpreted(path: str) -> None:
    """A prompt that is cut within: in halves, and whole."""
    [ids] = random_prompts(5, [24], load_spec(Path(path)).vocab_size)
    settings: dict[str, Any] = {
        "cuda_graphs": False,
        "max_running": 2,
        "max_context_tokens": 32,
        "max_batch_tokens": 32,
    }
    found: list[Computed] = []
    with pytest.MonkeyPatch.context() as patched, in_halves(patched) as rows:
        for name in (OVERLAPPED, ""):
            patched.setenv(VARIABLE, name)
            with lone_peer() as shared:
                runner = load(Path(path), late(), **settings, **shared)
                found.append(computed(runner, [Batch([ScheduledSequence(sequence_of(ids, num_blocks=2), 24)])]))
                runner.close()
    assert rows
    assert_equal(found[0], found[1])
