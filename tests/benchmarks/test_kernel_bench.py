"""Tests of the parts of kernels.py: times with a scripted clock, results, and the supervisor."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks.gpu.kernel_bench import results, runner, supervisor, timing
from benchmarks.gpu.kernel_cases import common

LIMITS = results.Limits(1e12, 100e12)


class FakeClock:
    """A call takes as long as it returns, a replay as long as its calls; every other replay twice so."""

    def __init__(self) -> None:
        self.captured: list[Callable[[], float]] = []
        self.replays = 0

    def seconds(self, call: Callable[[], float]) -> float:
        return call()

    def capture(self, calls: Sequence[Callable[[], float]]) -> Callable[[], float]:
        self.captured = list(calls)
        return self._replay

    def _replay(self) -> float:
        self.replays += 1
        return sum(call() for call in self.captured) * (1 + self.replays % 2)


@pytest.mark.parametrize(("seconds", "launches"), [(1e-6, 200), (1e-4, 20), (1.0, 4)])
def test_a_graph_holds_as_many_calls_as_are_worth_timing(seconds: float, launches: int) -> None:
    clock = FakeClock()
    calls = [lambda: seconds for _ in range(4)]
    found = timing.time_calls(calls, clock)
    assert len(clock.captured) == launches and clock.captured == calls * (launches // 4)
    assert found.low == pytest.approx(seconds) and found.high == pytest.approx(2 * seconds)
    assert found.low <= found.median <= found.high and clock.replays == timing.REPEATS + 1


def test_inputs_together_are_larger_than_the_cache() -> None:
    for num_bytes in (1, 3e6, 1e8, 1e9):
        sets = timing.num_sets(num_bytes)
        assert sets == 64 or sets * num_bytes >= timing.COLD_BYTES
    assert timing.num_sets(1e9) == 1


def case(run: Callable[[Any], Any], **options: Any) -> Any:
    """Doubles a vector."""
    return common.Case(
        "double",
        "3",
        lambda seed: torch.arange(3.0) + seed,
        run,
        lambda x, _: 2 * x,
        num_bytes=1e9,
        num_flops=1e9,
        tolerance=1e-3,
        **options,
    )


class Timed:
    """Times a call by the name of what it runs, and runs it."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def seconds(self, call: Callable[[], Any]) -> float:
        call()
        return self._seconds[self._name(call)]

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        return calls[0]  # the replays of one call: one round if a call takes long

    @staticmethod
    def _name(call: Callable[[], Any]) -> str:
        return next(cell.cell_contents.__name__ for cell in call.__closure__ if callable(cell.cell_contents))


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def add(x: torch.Tensor) -> torch.Tensor:
    return x + x


def fail(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("not | here\nat all")


def test_a_right_kernel_has_figures_and_verdicts() -> None:
    goals = (common.Goal("add", 1.5, 3.0), common.Goal("copy", 0.6, 0.8), common.Goal("absent", 1.0, 2.0))
    one = case(double, peers={"add": add, "add, too": add, "fail": fail, "zeros": torch.zeros_like}, goals=goals)
    found = runner.result_of("group", one, Timed({"double": 2e-3, "add": 4e-3}), LIMITS)
    assert not found.problem and found.seconds == 2e-3 and found.share == pytest.approx(0.5)
    assert found.times == {"add": 2.0, "add, too": 2.0}
    assert "ValueError" in found.problems["fail"] and "something else" in found.problems["zeros"]
    assert [v.found for v in found.verdicts] == [2.0, 0.5, None]
    assert [str(v).split(":")[0] for v in found.verdicts] == ["least", "MISSED", "not measured"]
    assert not found.is_well


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (lambda x: x * 2.1, "wrong: error 5"),
        (lambda x: torch.empty(3), "wrong: error inf"),  # nothing was written
        (lambda x: (x * 2)[:2], "wrong: error inf"),
        (fail, "ValueError: not / here at all"),
    ],
)
def test_a_wrong_kernel_has_no_figure(run: Callable[[Any], Any], told: str) -> None:
    found = runner.result_of("group", case(run), Timed({}), LIMITS)
    assert told in found.problem and found.seconds is None and not found.is_well
    assert results.line(found).count("|") == results.HEAD.splitlines()[0].count("|")


def test_errors_are_relative_and_see_what_is_no_number() -> None:
    error, x = common.error, torch.tensor([3.0, 4.0])
    assert error(x * 1.01, x) == pytest.approx(0.01, rel=1e-3) and error((x, x), (x, x)) == 0.0
    assert error(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    infinite = torch.tensor([1.0, -math.inf])
    assert error(infinite, infinite) == 0.0 and error(-infinite, infinite) == math.inf
    assert error(torch.tensor([3.0, math.nan]), x) == math.inf and error((x, x), x) == math.inf


def test_tables_are_told_in_whole_lines_and_as_json() -> None:
    goals = (common.Goal("TB/s", 0.1, 0.2), common.Goal("TFLOP/s", 9.0, 9.0))
    found = runner.result_of(
        "g", case(double, peers={"add": add}, goals=goals), Timed({"double": 5e-3, "add": 5e-3}), LIMITS
    )
    lines = [*results.HEAD.splitlines(), results.line(found)]
    assert len({text.count("|") for text in lines}) == 1 and "1.00 add" in lines[-1] and "5000.0" in lines[-1]
    row = json.loads(json.dumps(found.as_json()))
    assert row["verdicts"][0]["verdict"].startswith("aim: 0.2 TB/s") and row["times"] == {"add": 1.0}
    told = results.summary([found, results.Result("g", "broken", "1", "ended")])
    assert told[0].startswith("1 of 2 cases are right; of 2 goals 1 are met (1 with their aim), 1 missed")
    assert "broken" in told[1] and "MISSED" in told[2] and len(told) == 3


class Script:
    """A worker that prints given lines, and then waits for ever (None) or ends."""

    def __init__(self, messages: list[Any]) -> None:
        self._messages, self.is_killed = iter(messages), False

    def receive(self, seconds: float) -> Any:
        message = next(self._messages, EOFError())
        if message is None:
            raise TimeoutError
        if isinstance(message, EOFError):
            raise message
        return message

    def kill(self) -> None:
        self.is_killed = True


def begun(number: int) -> tuple[int, str, str, str]:
    return number, "group", f"kernel {number}", "shape"


def right(number: int) -> Any:
    return results.Result("group", f"kernel {number}", "shape")


def faulty(number: int) -> Any:
    return results.Result("group", f"kernel {number}", "shape", problem="a fault")


@pytest.mark.parametrize(
    ("scripts", "starts", "problems"),
    [
        ([[LIMITS, begun(0), right(0), begun(1), right(1)]], [0], ["", ""]),
        ([[LIMITS, begun(0)], [begun(1), right(1)]], [0, 1], ["its process ended", ""]),
        ([[LIMITS, begun(0), right(0), begun(1), None], [begun(2), right(2)]], [0, 2], ["", "not done in time", ""]),
        ([[LIMITS, begun(0), faulty(0)], [begun(1), right(1)]], [0, 1], ["a fault", ""]),
        ([[LIMITS, begun(0), faulty(0), begun(1), right(1)]], [0], ["a fault", ""]),
        ([[LIMITS, begun(0), faulty(0)], []], [0, 1], ["a fault"]),
        ([[None]], [0], []),  # not even the limits
    ],
)
def test_a_case_that_ends_its_process_is_followed_by_the_next(
    scripts: list[list[Any]], starts: list[int], problems: list[str]
) -> None:
    workers, given = [Script(messages) for messages in scripts], []
    waiting = iter(workers)

    def start(limits: Any, first: int) -> Script:
        given.append((limits, first))
        return next(waiting)

    found = [r for r in supervisor.run(start, 100.0, 10.0, lambda: 0.0) if isinstance(r, results.Result)]
    assert [r.problem for r in found] == problems and [first for _, first in given] == starts
    assert all(limits == LIMITS for limits, _ in given[1:]) and all(worker.is_killed for worker in workers)


def test_no_case_is_started_when_time_is_up() -> None:
    times = iter([0.0, 1.0, 2.0, 3.0, 11.0])
    found = list(supervisor.run(lambda *_: Script([begun(0), None]), 10.0, 5.0, lambda: next(times)))
    assert [r.problem for r in found] == ["not done in time"]


def test_groups_are_found_by_themselves() -> None:
    assert {"decode_attention", "prefill_attention", "mla", "quest", "rows", "blocks", "logits", "moe"} <= set(
        runner.groups()
    )
