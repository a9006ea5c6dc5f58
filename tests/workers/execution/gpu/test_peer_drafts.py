"""Models that draft on workers that share experts on devices: tokens and drafts are those of one worker on CPU,
whatever the others compute meanwhile."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diptych.workers.common.errors import ConfigError, RankLost
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.gpu.rank_passes import RankPasses
from diptych.workers.models.families.registry import load_spec

from ....support.drafters import FreeRows
from ....support.gpu.peers import PeerRunner, lone_peer, peers, together
from ....support.gpu.serving import early, late, load
from ....support.heads import eagle3_config, make_eagle3, make_mtp
from ...conftest import CheckpointOf
from ..draft.conftest import DraftOf
from ..draft.test_draft_model import SAMPLINGS, answers, counts
from .test_models_draft_on_device import MAX_RUNNING, SETTINGS, Answered, Untimed, answered, skipping, untimed
from .test_peer_halves import in_halves

METHODS = ("draft", "self", "eagle3", "mtp")
ENGINE: dict[str, Any] = {"chunk_tokens": 40, "max_running": MAX_RUNNING}


@pytest.fixture(scope="module")
def settings_of(
    checkpoint_of: CheckpointOf, draft_of: DraftOf, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    path, folder = checkpoint_of("mixtral"), tmp_path_factory.mktemp("heads")
    spec = load_spec(path)

    def own(method: str) -> dict[str, str]:
        if method == "self":
            return skipping(folder, spec.num_layers, [1])
        if method == "draft":
            return {"draft_model": str(draft_of("mixtral", 0.1))}
        if method == "mtp":
            return {"draft_model": str(make_mtp(folder / "mtp", path, "deepseek", 5, alone=True))}
        sizes = {"vocab_size": spec.vocab_size, "target_hidden_size": spec.hidden_size}
        config = eagle3_config("flat", eagle_aux_hidden_state_layer_ids=[0, 1, spec.num_layers], **sizes)
        return {"draft_model": str(make_eagle3(folder / "eagle3", config, 3))}

    return cache(lambda method: SETTINGS | {"speculation": method, "device": "fake"} | own(method))


@pytest.fixture(scope="module")
def path(checkpoint_of: CheckpointOf) -> Path:
    return checkpoint_of("mixtral")


@pytest.fixture(scope="module")
def on_cpu(path: Path, settings_of: Any) -> Callable[..., Answered]:
    @cache
    def made(method: str) -> Answered:
        own = {name: of for name, of in settings_of(method).items() if name != "device"}
        return answered(path, None, method, **own)

    return made


def drafted(of: PeerRunner, method: str | None) -> Answered:
    runner = of.runner
    if method is None:
        found = answers(Engine(runner, SchedulerConfig(**ENGINE)), runner.info.vocab_size, SAMPLINGS), None
    else:
        engine = untimed(runner, method, **ENGINE)
        found = answers(engine, runner.info.vocab_size, SAMPLINGS), counts(engine, method)
    runner.check()
    return found


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_one_drafts_beside_others(
    path: Path, settings_of: Any, on_cpu: Any, tmp_path: Path, method: str, graphs: bool
) -> None:
    """The other is idle; then it decodes without drafts; then it drafts too."""
    plain, expected = answered(path, None)[0], on_cpu(method)
    assert expected[0] == plain and expected[1][1] > 5
    with peers(path, tmp_path, **settings_of(method), cuda_graphs=graphs) as [first, second]:
        assert drafted(first, method) == expected
        assert first.num_shared == second.num_shared and bool(first.num_shared) == (method == "self")
        assert together(drafted, [first, second], [method, None]) == [expected, (plain, None)]
        assert together(drafted, [first, second], [method] * 2) == [expected] * 2
        assert first.steps == second.steps


class Resting(FreeRows):
    """Drafts in some steps only, whatever pays."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._random = random.Random(3)
        self.num_rested = 0

    def rests(self) -> bool:
        rests = self._random.random() < 0.4
        self.num_rested += rests
        return rests


@pytest.mark.parametrize("method", ["draft", "self"])
def test_one_whose_drafts_rest(path: Path, settings_of: Any, tmp_path: Path, method: str) -> None:
    """Meanwhile its steps are launched ahead."""
    plain = answered(path, None)[0]
    with peers(path, tmp_path, **settings_of(method)) as [first, second]:

        def work(of: PeerRunner) -> Any:
            if of is first:
                return drafted(of, method)[0]
            assert of.runner.proposer is not None
            drafter = Resting(method, Untimed(of.runner.proposer), 4)
            for rows in range(1, 200):
                drafter.measured(rows, 1.0)
            engine = Engine(of.runner, SchedulerConfig(**ENGINE), drafter=drafter)
            found = answers(engine, of.runner.info.vocab_size, SAMPLINGS)
            of.runner.check()
            assert drafter.num_rested > 5
            return found

        assert together(work, [first, second]) == [plain] * 2


@pytest.mark.parametrize("method", ["self", "eagle3"])
def test_drafts_beside_large_steps_in_halves(
    path: Path, settings_of: Any, on_cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Rows of drafts, and hidden states for a head, are of both halves."""
    with in_halves(monkeypatch) as rows, peers(path, tmp_path, **settings_of(method)) as made:
        assert together(drafted, made, [method] * 2) == [on_cpu(method)] * 2
    assert len(rows) > 5


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("method", ["draft", "self"])
def test_what_is_launched_is_in_order(path: Path, settings_of: Any, method: str, graphs: bool) -> None:
    """However late a device computes, and whatever the others draft in between."""
    found: list[Answered] = []
    for device in (early(), late()):
        with lone_peer() as shared:
            runner = load(path, device, **settings_of(method) | shared, cuda_graphs=graphs)
            found.append(drafted(PeerRunner(0, runner, device), method))
            found.append(drafted(PeerRunner(0, runner, device), None))
            runner.close()
    assert found[:2] == found[2:]
    assert found[0][0] == found[1][0] != answered(path, None)[0]
    assert found[0][1] is not None and found[0][1][1] > 5


@pytest.mark.parametrize("method", ["draft", "self"])
@pytest.mark.parametrize("number", [0, 1])
def test_one_that_fails_while_it_drafts(
    path: Path, settings_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, number: int
) -> None:
    """Its device is lost in a pass: the other ends, whether it computes that pass too or waits for the next step."""
    with peers(path, tmp_path, **settings_of(method)) as [first, second]:
        compute = RankPasses.compute

        def lost(passes: RankPasses, of: int, bucket: int) -> None:
            if passes.device is first.device and of == number:
                first.device.is_lost = True
                first.device.check()
            compute(passes, of, bucket)

        monkeypatch.setattr(RankPasses, "compute", lost)

        def ends(of: PeerRunner, with_method: str | None) -> str:
            with pytest.raises(RankLost) as error:
                drafted(of, with_method)
            of.runner.close()  # as its worker does
            return f"{type(error.value).__name__}: {error.value}"

        one, other = together(ends, [first, second], [method, None])
        assert one.startswith("DeviceLost") and "unspecified launch failure" in one
        assert other.startswith("PeerLost: worker 0 of the 2 that share experts ended")
        first.device.is_lost = False  # to be closed


def test_who_skips_other_layers_is_refused(path: Path, settings_of: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    each = [{}, skipping(other, load_spec(path).num_layers, [2])]
    what = r"shares other experts .*drafts without layers \[[12]\].* start all with the same settings"
    with pytest.raises(ConfigError, match=what), peers(path, tmp_path, each, **settings_of("self")):
        pass
