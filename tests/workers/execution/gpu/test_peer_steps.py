"""Workers that share experts on devices: tokens are one worker's, whatever the others compute in the same steps."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from diptych.workers.common.errors import ConfigError, DeviceLost, PeerLost, RankLost
from diptych.workers.core.sequence import Batch, ScheduledSequence
from diptych.workers.device.device import Work
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.models.layers.row_exchange import RowExchange

from ....support.checkpoints import make_checkpoint, random_prompts
from ....support.drafters import KnowingDrafter, of_cases
from ....support.gpu.peers import PeerRunner, lone_peer, peers, together
from ....support.gpu.serving import ALL_SORTS_OF_STEPS, DRAWN, GREEDY, Cases, cases_of, early, generate, late, load
from ...conftest import CheckpointOf
from .test_gpu_steps import sequence_of

END_S = 20.0  # for what must happen; no test passes by waiting
SPARSE = {"sparse_attention": "quest", "sparse_budget_tokens": 64}


@pytest.fixture(scope="module")
def cases(checkpoint_of: CheckpointOf) -> Cases:
    return cases_of(checkpoint_of("mixtral"))


def answers(
    of: PeerRunner, prompts: Sequence[list[int]], samplings: Sequence[Any] = (), **config: Any
) -> list[list[int]]:
    """Answers of one worker, which is idle afterwards."""
    found = generate(of.runner, prompts, samplings or [GREEDY] * len(prompts), **config).token_ids
    of.runner.check()
    return found


def test_an_idle_worker_launches_the_same_graphs(cases: Cases, tmp_path: Path) -> None:
    path, prompts, expected = cases
    with peers(path, tmp_path) as [first, second]:
        captured = second.device.num_captured
        run = generate(first.runner, prompts, [GREEDY] * len(prompts))
        assert run.token_ids == expected and run.num_ahead > 5
        first.runner.check()
        assert first.steps == second.steps and second.num_served == len(second.steps)
        in_graphs = [step for step in second.steps if not step.has_prompts]
        assert {step.num_rows for step in in_graphs} == {4} and len(in_graphs) == GREEDY.max_tokens - 1
        assert second.device.num_replayed == len(in_graphs)
        assert second.device.num_captured == captured
        assert answers(second, prompts) == expected


@pytest.mark.parametrize("changes", [{}, {"cuda_graphs": False}, {"expert_placement": "round_robin"}])
def test_one_prefills_while_others_decode(cases: Cases, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Three workers: one with a single sequence, one with chunks and arrivals, one that comes late."""
    path, prompts, expected = cases
    with peers(path, tmp_path, ({}, {}, {}), **changes) as made:
        loads = [
            ([3], {}),
            ([0, 1, 2, 3], {"chunk_tokens": 7, "arrivals": [0, 1, 2, 3]}),
            ([2, 0], {"arrivals": [0, 6]}),
        ]

        def work(of: PeerRunner, load: tuple[list[int], dict[str, Any]]) -> list[list[int]]:
            return answers(of, [prompts[i] for i in load[0]], **load[1])

        found = together(work, made, loads)
        assert found == [[expected[i] for i in chosen] for chosen, _ in loads]
        assert all(of.steps == made[0].steps for of in made)
        kinds = {step.has_prompts for step in made[0].steps}
        assert kinds == {True, False}
        assert all(bool(of.device.num_replayed) == changes.get("cuda_graphs", True) for of in made)


@pytest.mark.parametrize("changes", [{}, {"cuda_graphs": False}])
def test_each_worker_has_a_kv_tail_of_its_own(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = make_checkpoint(tmp_path / "wide", "mixtral", seed=9, head_dim=32)
    prompts, kivi = random_prompts(3, [1, 40, 70, 33]), {"kv_dtype": "kivi", "block_size": 32}
    on_cpu = load(path, None, **kivi)
    expected = generate(on_cpu, prompts, [GREEDY] * len(prompts)).token_ids
    with peers(path, tmp_path, **kivi, **changes) as made:
        chunks: list[dict[str, Any]] = [{}, {"chunk_tokens": 7}]
        assert together(lambda of, config: answers(of, prompts, **config), made, chunks) == [expected] * 2


def test_rows_that_need_the_host(cases: Cases, tmp_path: Path) -> None:
    """Penalties, draws and log-probabilities on one, of a prompt too; sparse decodes and plain ones on both."""
    path, prompts, _ = cases
    samplings = [
        replace(DRAWN, seed=8, frequency_penalty=0.5, logprobs=2),
        replace(GREEDY, prompt_logprobs=1),
        DRAWN,
        replace(GREEDY, logit_bias={3: 2.0}),
    ]
    expected = [generate(load(path, None), prompts, of).token_ids for of in (samplings, [GREEDY] * 4)]
    with peers(path, tmp_path) as made:
        found = together(lambda of, asked: answers(of, prompts, asked), made, [samplings, [GREEDY] * 4])
    assert found == expected


@pytest.mark.parametrize("changes", [{}, {"cuda_graphs": False}])
def test_sparse_decodes_beside_short_contexts(checkpoint_of: CheckpointOf, tmp_path: Path, changes: Any) -> None:
    path, prompts, _ = cases_of(checkpoint_of("qwen3moe"))
    long, short = [prompts[3]], [prompts[0]]
    expected = [generate(load(path, None, **SPARSE), of, [GREEDY]).token_ids for of in (long, short)]
    with peers(path, tmp_path, **SPARSE, **changes) as made:
        assert together(answers, made, [long, short]) == expected


@pytest.mark.parametrize("changes", [{}, {"cuda_graphs": False}])
def test_drafts_of_one_beside_decodes_of_the_other(cases: Cases, tmp_path: Path, changes: dict[str, Any]) -> None:
    """In buckets that no step without drafts has."""
    path, prompts, expected = cases
    drafter = KnowingDrafter(0.9, 5, of_cases(zip(prompts, expected, strict=True)))
    drafts = {"speculation": "ngram", "max_draft_tokens": 5, "max_running": 4}
    with peers(path, tmp_path, **drafts, **changes) as [first, second]:

        def work(of: PeerRunner) -> list[list[int]]:
            return answers(of, prompts, drafter=drafter if of is first else None, max_running=4)

        assert together(work, [first, second]) == [expected] * 2
        assert drafter.counts["accepted"] > 10
        assert max(step.num_rows for step in second.steps if not step.has_prompts) > 4
        assert answers(second, prompts[:1], drafter=drafter) == expected[:1]


def test_experts_of_few_bits(cases: Cases, tmp_path: Path) -> None:
    """Products with rows of which only some are this worker's."""
    path, prompts, _ = cases
    expected = generate(load(path, early(), quantize="int8"), prompts, [GREEDY] * 4).token_ids
    with peers(path, tmp_path, quantize="int8") as [first, second]:
        assert together(answers, [first, second], [prompts, prompts[:2]]) == [expected, expected[:2]]


def test_what_is_padding_does_not_matter(cases: Cases, tmp_path: Path) -> None:
    """Idle rows of every step are NaN on the worker that serves; what its experts give is not."""
    path, prompts, expected = cases
    with peers(path, tmp_path) as [first, second]:
        backend: Any = second.runner.backend
        own = backend.steps._own
        own.prompts.pieces.decoder.weights.embed[0] = torch.nan  # the token of idle rows
        assert answers(first, prompts) == expected
        assert second.num_served == len(second.steps)


@pytest.mark.parametrize("changes", [{}, {"cuda_graphs": False}])
def test_what_is_launched_is_in_order(cases: Cases, changes: dict[str, Any]) -> None:
    """However late a device computes: tokens, without what the experts of others would give, are the same."""
    path, prompts, expected = cases
    found: list[list[list[int]]] = []
    for device in (early(), late()):
        with lone_peer() as shared:
            runner = load(path, device, **shared, **changes)
            for config in ALL_SORTS_OF_STEPS:
                run = generate(runner, prompts, [GREEDY] * len(prompts), **config)
                runner.check()
                found.append(run.token_ids)
                assert run.num_ahead > 5
            runner.close()
    assert all(tokens == found[0] for tokens in found) and found[0] != expected


def test_memory_is_measured_with_the_rows_of_all(cases: Cases) -> None:
    """Before the others are there: as if each had as many as the largest step."""

    class Measured(FakeDevice):
        def peak_bytes(self, work: Work) -> int:
            self.lane("profile").run(work)
            self.synchronize()
            return 0

    sizes, gather = list[int](), RowExchange.gather

    def gathered(exchange: RowExchange, *given: Any) -> Any:
        found = yield from gather(exchange, *given)
        sizes.append(len(found[0]))
        return found

    with lone_peer() as shared, patch.object(RowExchange, "gather", gathered):
        load(cases[0], Measured(), max_batch_tokens=100, **shared).close()
    assert sizes[:3] == [200] * 3


def test_a_step_that_fails_ends_all(cases: Cases, tmp_path: Path) -> None:
    path, prompts, _ = cases
    with peers(path, tmp_path) as [first, second]:
        answers(first, prompts[:1])
        with pytest.raises(RankLost, match=r"worker 0 of those that share experts failed in a step \(a step of 7 seq"):
            first.runner.launch(Batch([ScheduledSequence(sequence_of([1], 1), 1)] * 7))
        assert_peer_lost(second, "worker 0 of the 2 that share experts ended")


def test_a_device_that_is_lost_ends_all_and_is_named(cases: Cases, tmp_path: Path) -> None:
    path, prompts, _ = cases
    with peers(path, tmp_path) as [first, second]:
        answers(first, prompts[:1])
        second.device.is_lost = True
        with pytest.raises(PeerLost, match="worker 1 of the 2 that share experts ended"):
            answers(first, prompts[:1])
        with pytest.raises(DeviceLost, match="unspecified launch failure"):
            until_lost(second)
        second.device.is_lost = False  # to be closed


def until_lost(of: PeerRunner) -> None:
    """Ask as an idle engine does, until an error is raised."""
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        of.runner.check()
        time.sleep(0.01)


def assert_peer_lost(of: PeerRunner, what: str) -> None:
    with pytest.raises(PeerLost, match=what):
        until_lost(of)


def test_who_has_other_buffers_is_refused(cases: Cases, tmp_path: Path) -> None:
    what = r"shares other experts .*max_running [68].* start all with the same settings"
    with pytest.raises(ConfigError, match=what), peers(cases[0], tmp_path, ({}, {"max_running": 8})):
        pass
