"""Models that draft for a worker whose ranks have a device each: real processes, fake devices. Tokens are those without
drafts, and the drafts those of one rank on CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from diptych.workers.common.errors import RankLost
from diptych.workers.common.request import Request
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.draft.draft_model import DraftModel
from diptych.workers.execution.draft.guarded_draft import GuardedDraft
from diptych.workers.execution.gpu.draft_passes import ModelPasses, PassChain
from diptych.workers.execution.model_runner import ModelRunner

from ..support.gpu.serving import load
from ..support.harness import TINY
from ..workers.execution.draft.test_draft_model import GREEDY, SAMPLINGS, answers, counts
from ..workers.execution.draft.test_draft_ranks import ranks_of_draft, settings_of
from ..workers.execution.gpu.test_models_draft_on_device import untimed
from .test_model_drafts import drafted as num_drafted
from .test_model_drafts import requests, routed, services, without_drafts

SETTINGS: dict[str, Any] = {"max_running": 2, "max_context_tokens": 256, "max_draft_tokens": 4}
CONFIG: dict[str, Any] = {"chunk_tokens": 40, "max_running": 2}
NO_GRAPHS = {"cuda_graphs": False}
LONG = pytest.mark.long

pytestmark = pytest.mark.e2e


@contextmanager
def loaded(method: str, folder: Path, num_ranks: int, **changes: Any) -> Iterator[ModelRunner]:
    """A worker of so many ranks, each on a fake device."""
    num_threads = torch.get_num_threads()
    settings = SETTINGS | settings_of(method, folder) | changes
    runner = load(TINY, None, device="fake", tensor_parallel=num_ranks, **settings)
    try:
        yield runner
    finally:
        runner.close()
        torch.set_num_threads(num_threads)


def compare(runner: ModelRunner, method: str, folder: Path, kv_dtype: str = "auto") -> Engine:
    """Compare answers, and how much was drafted and accepted. Returns the engine of the ranks."""
    settings = SETTINGS | {"kv_dtype": kv_dtype}
    plain = load(TINY, None, **settings)
    expected = answers(Engine(plain, SchedulerConfig(**CONFIG)), plain.info.vocab_size, SAMPLINGS[:4])
    one = untimed(load(TINY, None, **settings, **settings_of(method, folder)), method, **CONFIG)
    assert answers(one, plain.info.vocab_size, SAMPLINGS[:4]) == expected
    engine = untimed(runner, method, **CONFIG)
    assert answers(engine, plain.info.vocab_size, SAMPLINGS[:4]) == expected
    assert counts(engine, method) == counts(one, method)
    assert counts(engine, method)[0] > 60
    return engine


def chain_of(runner: ModelRunner) -> PassChain:
    assert isinstance(runner.proposer, GuardedDraft) and isinstance(runner.proposer.draft, DraftModel)
    decoder = runner.proposer.draft._decoder
    assert isinstance(decoder, ModelPasses)
    return decoder.chain


def ask(engine: Engine) -> None:
    """Give it a request, and compute its prompt, of both models."""
    engine.submit("0/last", Request("last", tuple(range(5, 30)), GREEDY, 60.0), [])
    engine.step()


def test_all_ranks_draft_and_one_that_is_killed_in_a_pass_ends_the_worker(tmp_path: Path) -> None:
    before = psutil.Process().children()
    with loaded("draft", tmp_path, 2) as runner:
        [rank] = [process for process in psutil.Process().children() if process not in before]
        engine, chain = compare(runner, "draft", tmp_path), chain_of(runner)
        assert ranks_of_draft(runner.layout) == [2]
        compute = chain._own.compute

        def killing(number: int, bucket: int) -> None:
            if number == 1:
                rank.kill()
            compute(number, bucket)

        chain._own.compute = killing
        ask(engine)
        with pytest.raises(RankLost, match="rank 1 was killed by SIGKILL: all 2 ranks of the worker end with it"):
            engine.step()
        assert not rank.is_running()
        assert chain._own._graphs and chain._choices
    # A communicator of GPUs ends no sooner than the graphs that hold its calls.
    assert not chain._own._graphs and not chain._choices


def test_a_model_drafts_for_itself_and_a_pass_that_fails_on_rank_0_ends_all(tmp_path: Path) -> None:
    """The others wait in the midst of it."""
    with loaded("self", tmp_path, 2, **NO_GRAPHS) as runner:
        engine, chain = compare(runner, "self", tmp_path), chain_of(runner)

        def failing(*_: object, **_how: object) -> None:
            raise MemoryError("no room")

        chain._choose = failing
        ask(engine)
        with pytest.raises(RankLost, match=r"rank 0 failed in a pass of the draft \(no room\): all 2 ranks"):
            engine.step()


@LONG
@pytest.mark.parametrize(
    ("method", "num_ranks", "changes", "of_draft"),
    [
        ("draft", 4, NO_GRAPHS, [4]),
        ("draft", 2, {"draft_tensor_parallel": 1}, [1]),
        ("draft", 2, NO_GRAPHS | {"kv_dtype": "int8", "kv_axis_order": "layer"}, [2]),
        ("self", 2, {}, []),
        ("self", 4, NO_GRAPHS, []),
        ("eagle3", 2, {}, [1]),
        ("eagle3", 4, NO_GRAPHS, [1]),
        ("mtp", 2, {}, [1]),
    ],
)
def test_tokens_of_ranks_on_devices_that_draft(
    method: str, num_ranks: int, changes: dict[str, Any], of_draft: list[int], tmp_path: Path
) -> None:
    with loaded(method, tmp_path, num_ranks, **changes) as runner:
        compare(runner, method, tmp_path, changes.get("kv_dtype", "auto"))
        assert ranks_of_draft(runner.layout) == of_draft


@pytest.mark.parametrize(
    ("method", "prefill", "decode"),
    [
        ("draft", 2, 1),
        ("eagle3", 1, 2),
        pytest.param("draft", 1, 2, marks=LONG),
        pytest.param("eagle3", 2, 1, marks=LONG),
        pytest.param("mtp", 2, 2, marks=LONG),
    ],
)
async def test_the_drafts_kv_moves_between_workers_of_unlike_sizes(
    tmp_path: Path, method: str, prefill: int, decode: int
) -> None:
    settings = settings_of(method, tmp_path) | NO_GRAPHS | {"device": "fake", "max_running": 4}
    sizes = {"prefill": prefill, "decode": decode}
    drafting = {role: settings | {"tensor_parallel": size} for role, size in sizes.items()}
    async with services([*sizes], "grpc", drafting) as (infos, workers), routed(infos) as router:
        for request, expected in [*zip(requests(2048, "x"), without_drafts("auto"), strict=True)][::3]:
            assert [token async for delta in router.stream(request) for token in delta.token_ids] == expected
        proposer = workers[1]._runner.proposer
        assert proposer is not None and proposer.num_anew == 0, "the draft's KV came with the hand-off"
        assert num_drafted(workers[1:]) > 20  # by a head: only where its KV came, too
