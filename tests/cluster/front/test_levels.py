"""The level of a request: its own values, then its tier's, then its model name's, otherwise none."""

import math

import pytest

from diptych.cluster.common.config import NamedLevel, ServiceLevel
from diptych.cluster.front.levels import AskedLevel, ServiceLevels
from diptych.workers.common.errors import InvalidRequest
from diptych.workers.common.request import RequestLevel

TIERS = {"priority": NamedLevel(ttft_s=0.2), "flex": NamedLevel(ttft_s=30, tpot_s=2, admission="wait")}
MODELS = {"chat": NamedLevel(ttft_s=0.5, tpot_s=0.05, admission="refuse"), "plain": NamedLevel()}
LEVELS = ServiceLevels(ServiceLevel(tiers=TIERS), MODELS)


@pytest.mark.parametrize(
    ("model", "asked", "expected"),
    [
        ("base", AskedLevel(), RequestLevel(model="base")),
        ("plain", AskedLevel(), RequestLevel(model="plain")),
        ("base", AskedLevel("auto"), RequestLevel(model="base")),
        ("base", AskedLevel("priority"), RequestLevel(0.2, model="base", tier="priority")),
        ("chat", AskedLevel("default"), RequestLevel(0.5, 0.05, True, "chat")),
        ("chat", AskedLevel("priority"), RequestLevel(0.2, 0.05, True, "chat", "priority")),
        ("chat", AskedLevel("flex"), RequestLevel(30, 2, False, "chat", "flex")),
        ("chat", AskedLevel("flex", tpot_s=0.01), RequestLevel(30, 0.01, False, "chat", "flex")),
        ("chat", AskedLevel(ttft_s=9, admission="wait"), RequestLevel(9, 0.05, False, "chat")),
    ],
)
def test_each_value_is_the_first_that_is_given(model: str, asked: AskedLevel, expected: RequestLevel) -> None:
    assert LEVELS.of(model, asked) == expected


def test_the_cluster_says_what_becomes_of_requests_that_do_not() -> None:
    assert not ServiceLevels().of("base", AskedLevel()).refuse
    refusing = ServiceLevels(ServiceLevel(admission="refuse"))
    assert refusing.of("base", AskedLevel()).refuse
    assert not refusing.of("base", AskedLevel(admission="wait")).refuse


@pytest.mark.parametrize("tier", ["scale", "", "PRIORITY", "x" * 1000])
def test_an_unknown_tier_is_refused_with_those_that_there_are(tier: str) -> None:
    with pytest.raises(InvalidRequest, match="send auto or default or priority or flex") as refused:
        LEVELS.of("base", AskedLevel(tier))
    assert refused.value.param == "service_tier" and len(refused.value.message) < 200


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_an_impossible_time_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequest, match=r"ttft_s must be in \[0.001, 3600"):
        LEVELS.of("base", AskedLevel(ttft_s=value))
    with pytest.raises(InvalidRequest, match=r"tpot_s must be in \[0.0001, 60"):
        LEVELS.of("base", AskedLevel(tpot_s=value))
