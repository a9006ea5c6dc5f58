"""Kernels that have not run on a GPU, and the variable that asks for them."""

import pytest

from diptych.kernels.common.untried import KERNELS, VARIABLE, is_wanted, wanted
from diptych.workers.common.errors import ConfigError
from diptych.workers.execution.gpu.gpu_loader import untried_kernels


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("", []),
        ("hopper-prompts", ["hopper-prompts"]),
        (" hopper-experts, dependent-launch,", 2),
        ("all", len(KERNELS)),
    ],
)
def test_the_environment_names_them(value: str, found: list[str] | int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert (wanted() if isinstance(found, list) else len(wanted())) == found
    assert [name for name in KERNELS if is_wanted(name)] == wanted()


def test_without_it_none_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not wanted()


def test_a_name_that_is_not_known_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "hopper-prompts,hoper")
    with pytest.raises(ValueError, match="names hoper: there are dependent-launch, hopper-prompts"):
        is_wanted("hopper-prompts")
    with pytest.raises(ConfigError, match="names hoper"):
        untried_kernels()
