"""Two halves of a step: where they are cut, and in which order their parts and exchanges are."""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diptych.workers.common.errors import ConfigError
from diptych.workers.device.device import Event, Lane, Work
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.execution.common.halves import Halves, are_wanted, first_rows, least_rows, rows_of_half
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import LayerSpec, MoeSpec
from diptych.workers.models.layers.layer import Layer
from diptych.workers.models.layers.row_exchange import RowExchange
from diptych.workers.models.layers.turns import InTurns, finished

from ..conftest import CheckpointOf

SEQUENCES = st.lists(st.integers(1, 6) | st.integers(1, 600), max_size=20)


@given(SEQUENCES, st.integers(0, 500))
def test_no_half_has_more_rows_than_fit(num_new: list[int], num_others: int) -> None:
    """The largest worker of a step, or one beside a larger one."""
    total = sum(num_new)
    num_half = rows_of_half(total + num_others)
    first = first_rows(num_new, num_half)
    assert 0 <= first <= num_half and total - first <= num_half
    start = 0
    for num in num_new:
        in_first = min(max(first - start, 0), num)
        assert num == 1 or (in_first != 1 and num - in_first != 1)
        start += num


def test_a_worker_beside_a_larger_one_is_cut_in_the_middle() -> None:
    assert first_rows([300], rows_of_half(1000)) == 150
    assert first_rows([1, 1, 298], rows_of_half(300)) == 150
    assert first_rows([], rows_of_half(1000)) == 0


def test_layers_of_more_products_are_cut_at_fewer_rows(checkpoint_of: CheckpointOf) -> None:
    """DeepSeek-V3's, Mixtral's and DeepSeek-V2-Lite's sizes."""
    spec = load_spec(checkpoint_of("mixtral"))

    def least(hidden_size: int, top_k: int, intermediate_size: int) -> int:
        layers: list[LayerSpec] = []
        for layer in spec.layers:
            of = layer.feed_forward
            assert isinstance(of, MoeSpec)
            routing, expert = replace(of.routing, top_k=top_k), replace(of.expert, intermediate_size=intermediate_size)
            layers.append(replace(layer, feed_forward=replace(of, routing=routing, expert=expert)))
        return least_rows(replace(spec, hidden_size=hidden_size, layers=tuple(layers)))

    assert least(7168, 8, 2048) == least(4096, 2, 14336) == 1562
    assert least(2048, 6, 1408) == 10597


@dataclass
class Logged:
    """A Lane that notes in which order what is queued."""

    name: str
    lane: Lane
    log: list[str]
    names: dict[int, str]
    halves: dict[int, str]
    kept: list[Event] = field(default_factory=list[Event])

    def run(self, work: Work) -> None:
        half = getattr(work, "__self__", None)
        letter = "" if half is None else self.halves.setdefault(id(half), "ABC"[len(self.halves)])
        self.log.append(f"{getattr(work, '__name__', 'agree')} {letter}".strip())
        self.lane.run(work)

    def after(self, event: Event) -> None:
        self.log.append(f"{self.name} after {self.names[id(event)]}")
        self.lane.after(event)

    def record(self) -> Event:
        event = self.lane.record()
        self.names[id(event)] = self.log[-1]
        self.kept.append(event)
        return event


def halves_of(device: FakeDevice, log: list[str]) -> tuple[Halves, Lane]:
    names, letters = dict[int, str](), dict[int, str]()
    lane, beside = (Logged(name, device.lane(name), log, names, letters) for name in ("lane", "beside"))
    return Halves(RowExchange(0, 2), beside, 5), lane


def some_layers(num: int) -> list[Layer]:
    """Layers of which every second one has experts that others have."""
    return [cast(Any, _Of(experts=object() if i % 2 else None)) for i in range(num)]


@dataclass
class _Of:
    experts: object


def work_of(number: float, num_exchanges: int, results: list[Tensor]) -> InTurns[None]:
    value = torch.full((3,), number)
    for i in range(num_exchanges):
        message = value + i
        value = (yield lambda message=message: message * 2) + 1
    results.append(value)


@pytest.mark.parametrize("is_late", [True, False])
def test_exchanges_are_in_order_and_waited_for(is_late: bool) -> None:
    device, log, found = FakeDevice(is_late=is_late), list[str](), [list[Tensor](), list[Tensor]()]
    halves, lane = halves_of(device, log)
    works = [work_of(number, 4, of) for number, of in zip((1.0, 50.0), found, strict=True)]
    halves.run(lane, works, some_layers(5))
    device.synchronize()
    for number, [value] in zip((1.0, 50.0), found, strict=True):
        expected: list[Tensor] = []
        finished(work_of(number, 4, expected))
        assert torch.equal(value, expected[0])
    steps: list[str] = []
    for i in range(4):
        for half in "AB":
            steps += [f"lane after exchange {half}"] if i else []
            steps += [f"advance {half}", f"beside after advance {half}", f"exchange {half}"]
    for half in "AB":
        steps += [f"lane after exchange {half}", f"finish {half}"]
    assert log == ["agree", *steps]


@pytest.mark.parametrize(("num", "what"), [(3, "less often"), (5, "more often")])
def test_a_half_that_exchanges_otherwise_than_was_said_fails(num: int, what: str) -> None:
    device = FakeDevice(is_late=False)
    halves, lane = halves_of(device, [])
    with pytest.raises(AssertionError, match=what):
        halves.run(lane, [work_of(1.0, num, []) for _ in range(2)], some_layers(5))


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_UNTRIED_KERNELS", "overlapped-halves")
    assert are_wanted()
    monkeypatch.setenv("DIPTYCH_UNTRIED_KERNELS", "overlapped-quarters")
    with pytest.raises(ConfigError, match="overlapped-quarters: there are"):
        are_wanted()
