"""Latent attention on the CUDA engine, on a fake device: transformers' tokens, in graphs and without, in any batch."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from diptych.workers.common.errors import ConfigError
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.models.layers import mla

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

ARCHS = ["deepseek-v2", "deepseek-v3"]


@pytest.fixture(scope="module", params=ARCHS)
def cases(latent_of: CheckpointOf, request: pytest.FixtureRequest) -> Cases:
    return cases_of(latent_of(request.param))


@pytest.fixture(scope="module")
def runner(cases: Cases) -> ModelRunner:
    return load(cases[0], late())


@pytest.mark.parametrize("config", ALL_SORTS_OF_STEPS)
def test_tokens(runner: ModelRunner, cases: Cases, config: dict[str, Any]) -> None:
    assert_tokens(runner, cases, config)


def test_each_form_is_taken(runner: ModelRunner, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside decodes, and in several parts if sequences between them use the other form."""
    _, prompts, expected = cases
    taken: set[tuple[str, int]] = set()

    def spied(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spy(*args: Any) -> Tensor:
            taken.add((form.__name__, len(args[-1])))
            return form(*args)

        return spy

    for form in (mla.expanded, mla.absorbed):
        monkeypatch.setattr(mla, form.__name__, spied(form))
    assert generate(runner, prompts, [GREEDY] * 4, chunk_tokens=7).token_ids == expected
    assert {name for name, _ in taken} == {"expanded", "absorbed"} and max(num for _, num in taken) > 1


def test_without_graphs(cases: Cases) -> None:
    path, prompts, expected = cases
    device = early()
    runner = load(path, device, cuda_graphs=False, kv_axis_order="layer")
    run = generate(runner, prompts, [GREEDY] * 4, arrivals=[0, 1, 1, 2], chunk_tokens=24)
    assert run.token_ids == expected and run.num_ahead > 5 and not device.num_captured


def test_sizes_that_kernels_do_not_know_are_refused(checkpoint_of: CheckpointOf) -> None:
    with pytest.raises(ConfigError, match="does not support latents and heads of sizes other than"):
        load(checkpoint_of("deepseek-v2"), FakeDevice())
