"""A worker whose cores come and go computes the same tokens."""

import threading
from pathlib import Path

import pytest

from diptych.kernels.cpu.load import library
from diptych.workers.common.cores import affinity_kept, usable_cores
from diptych.workers.common.request import SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.execution.cpu import elastic_team
from diptych.workers.execution.cpu.core_sharing import CoreSharing
from diptych.workers.execution.cpu.elastic_team import ElasticTeam
from diptych.workers.execution.model_runner import ModelRunner

from ....support.checkpoints import random_prompts
from ....support.serving import Server

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels are not built")
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=3)


def generate(runner: ModelRunner) -> list[list[tuple[int, float | None]]]:
    server = Server(runner, SchedulerConfig(max_batch_tokens=64), prefix_cache=False)
    prompts = random_prompts(7, [1, 40, 200])
    return [[(t.token_id, t.logprob) for t in tokens] for tokens in server.generate(prompts, [GREEDY] * 3)]


@pytest.mark.skipif(len(usable_cores()) < 2, reason="there is no other core to borrow")
@affinity_kept()
def test_borrowed_cores_change_no_bit(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_team, "PIECE_S", 0.0)  # the cores are looked at after each layer
    own, other = usable_cores()[:2]
    config = WorkerConfig.of(llama, kv_memory_bytes=8 << 20, max_context_tokens=512, threads=1)
    alone = ModelRunner.load(config)
    expected = generate(alone)
    alone.close()
    sizes: set[int] = set()
    resize = elastic_team.Team.resize

    def counted(team: elastic_team.Team, cores: tuple[int, ...]) -> None:
        sizes.add(len(cores))
        resize(team, cores)

    monkeypatch.setattr(elastic_team.Team, "resize", counted)
    try:
        neighbour = CoreSharing((other,), ())
    except OSError as e:
        pytest.skip(f"the locks are not to be had: {e}")
    runner = ModelRunner.load(config.changed(cores=(own,), share_cores=True))
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            neighbour.begin()
            stop.wait(0.002)
            neighbour.rest()
            stop.wait(0.002)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(100):
            assert generate(runner) == expected
            if sizes == {1, 2}:
                break
    finally:
        stop.set()
        thread.join()
        runner.close()
        neighbour.close()
    assert sizes == {1, 2}


@pytest.mark.skipif(usable_cores()[:2] != (0, 1), reason="the cores 0 and 1 are not to be had")
@affinity_kept()
def test_a_step_on_borrowed_cores_is_told_from_others(tmp_path: Path) -> None:
    for number in (0, 1):
        topology = tmp_path / f"cpu{number}/topology"
        topology.mkdir(parents=True)
        for name in ("core_id", "thread_siblings_list", "physical_package_id"):
            (topology / name).touch()
    found = library()
    assert found is not None
    neighbour = CoreSharing((1,), (), tmp_path)
    elastic = ElasticTeam(elastic_team.Team(found, 2, num_active=1), CoreSharing((0,), (1,), tmp_path))
    list(elastic.pieces((3,)))
    assert elastic.has_borrowed
    elastic.rest()
    neighbour.begin()
    list(elastic.pieces((3,)))
    assert not elastic.has_borrowed
    neighbour.close()
    elastic.close()
    elastic.team.close()


def test_pieces_are_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer once, in order; a piece ends after a watched layer."""
    topology = tmp_path / "cpu0/topology"
    topology.mkdir(parents=True)
    for name in ("core_id", "thread_siblings_list", "physical_package_id"):
        (topology / name).touch()
    found = library()
    assert found is not None
    elastic = ElasticTeam(elastic_team.Team(found, 1), CoreSharing((0,), (), tmp_path))
    for piece_s in (0.0, 10.0):
        monkeypatch.setattr(elastic_team, "PIECE_S", piece_s)
        for ends in ((7,), (2, 3, 7)):
            pieces = list(elastic.pieces(ends))
            assert [first for first, _ in pieces] == [0, *(last for _, last in pieces[:-1])]
            assert {*ends} <= {last for _, last in pieces} and pieces[-1][1] == 7
            assert all(first < last for first, last in pieces)
    elastic.close()
    elastic.team.close()
