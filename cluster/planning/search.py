"""Searches layouts for the highest request rate at which a service level holds. Pure: `run` measures.

    all layouts ─ one request at a time ─> those that meet the level at all
                ─ race over a quarter of the load ─> best third
                ─ race over half of it ─> best ones
                ─ bisection over all of it ─> goodput of each, best first; splits beside the best

This is successive halving (Jamieson & Talwalkar, AISTATS 2016). In a race all layouts of a group are measured at one
rate, which is raised for those that hold the level until few do. A group is a kind of layout and a way of routing: of
each the best layouts stay in until the end, so that they can be compared.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from ...workers.common.errors import ConfigError
from ..bench.rate_search import Bracket, Search, Trial, bracket_of, next_rate
from ..common.plurals import count
from .layouts import Group, Layout, PlannedLevel, Ranks, beside, layouts_of

NUM_IDLE = 32  # requests of the first round
SHORTEST_RACE = 500  # requests: with few the load ends before the workers are full
MOST_STEPS = 10
NUM_FINALISTS = 6
NUM_OF_GROUP = 2
RACES = ((0.25, 1 / 3), (0.5, 0.0))  # part of the load, and of the layouts that go on beside the finalists
WIDTH = 0.03  # of the bisection, relative
UP, DOWN = sqrt(2), 0.5  # steps of a race


@dataclass(frozen=True, slots=True)
class Measured:
    """Simulation of a layout at a rate. Latencies: p50 and p99, in ms; `handed_off`: share of the requests. `is_burst`:
    the load came in so short a time that the rate says nothing of a longer one."""

    rate: float
    good: int
    sent: int
    ttft_ms: tuple[float, float] = (0.0, 0.0)
    tpot_ms: tuple[float, float] = (0.0, 0.0)
    handed_off: float = 0.0
    is_burst: bool = False

    @property
    def share(self) -> float:
        return self.good / self.sent


Measure = Callable[[Layout, float, int], Measured]  # rate, number of requests


@dataclass(frozen=True, slots=True)
class Question:
    """Layout to measure with the first `num` requests: at `rates`, and then where `search` leads, if it is given. The
    search takes a rate at which the load is a burst for one that fails: N requests at once are the same at any rate."""

    layout: Layout
    num: int
    rates: tuple[float, ...] = ()
    search: Search | None = None


@dataclass(frozen=True, slots=True)
class LayoutFinding:
    """Measurements of a layout, and the rate between which it holds the level and fails."""

    layout: Layout
    measured: tuple[Measured, ...]
    bracket: Bracket

    @property
    def rate(self) -> float:
        """Goodput: highest rate that holds the level; 0 where none does."""
        return self.bracket.holds or 0.0

    @property
    def best(self) -> Measured:
        """Measurement at the goodput, or the one that came nearest to the level."""
        if self.bracket.holds is None:
            return max(self.measured, key=lambda each: each.share)
        return self.at(self.bracket.holds)

    def at(self, rate: float) -> Measured:
        return next(each for each in self.measured if each.rate == rate)

    @property
    def is_bounded(self) -> bool:
        """Return whether a higher rate failed the level; else the goodput is at least `rate`."""
        return self.bracket.fails is not None and not self.at(self.bracket.fails).is_burst

    @property
    def merit(self) -> tuple[float, float, float]:
        """Order of findings: by goodput, then by how nearly the next rate holds, then by TTFT."""
        next_share = self.at(self.bracket.fails).share if self.bracket.fails is not None else 1.0
        return self.rate, next_share if self.rate else self.best.share, -self.best.ttft_ms[1]


Run = Callable[[Sequence[Question]], Iterable[LayoutFinding]]
Report = Callable[[str], None]


def rate_text(rate: float) -> str:
    """Rate with three digits, or all before the point."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def answer(question: Question, measure: Measure, share: float) -> LayoutFinding:
    """Measure a layout as the question asks. `share`: of the requests that must meet the level."""
    measured = [measure(question.layout, rate, question.num) for rate in question.rates]
    if question.search is None:
        return _finding(question.layout, measured, share)
    while (rate := next_rate(_trials(measured, bursts_fail=True), question.search)) is not None:
        found = measure(question.layout, rate, question.num)
        measured.append(found if found.share >= share else replace(found, is_burst=False))  # it fails by itself
    bracket = bracket_of(_trials(measured, bursts_fail=True), share)
    return LayoutFinding(question.layout, tuple(measured), bracket)


@dataclass(frozen=True, slots=True)
class SearchGoal:
    """Load and goal of a search. `idle_rate`: at which requests hardly meet; `first_rate`: to begin with."""

    num_requests: int
    level: PlannedLevel
    idle_rate: float
    first_rate: float


def find_best(layouts: Sequence[Layout], goal: SearchGoal, run: Run, report: Report) -> list[LayoutFinding]:
    """Return the finalists, best first. Raises ConfigError where no layout meets the level."""
    able = _able(layouts, goal, run, report)
    firsts = dict.fromkeys(able, goal.first_rate)
    for num, part in _races(goal.num_requests):
        kept = _kept(_race(firsts, num, goal, run, report), part)
        firsts = {each.layout: each.rate or each.measured[-1].rate for each in kept}
    found = _bisected(firsts, goal, run, report)
    if not found[0].rate:
        raise _unmet(found, goal)
    return _climbed(found, able, goal, run, report)


def _climbed(
    found: list[LayoutFinding], layouts: Sequence[Layout], goal: SearchGoal, run: Run, report: Report
) -> list[LayoutFinding]:
    """Return the findings with those splits beside the best of each group that are better: a race over a part of the
    load may have left them out."""
    known = {each.layout for each in found}
    while True:
        best_of = {each.layout.group: each for each in reversed(found) if each.rate}
        rates = {near: best.rate for best in best_of.values() for near in beside(best.layout, layouts)}
        questions = [
            Question(layout, goal.num_requests, (rate * (1 + WIDTH),))
            for layout, rate in rates.items()
            if layout not in known
        ]
        if not questions:
            return found
        known |= {question.layout for question in questions}
        better = {each.layout: each.rate for each in _reported(questions, run, report) if each.rate}
        if better:
            found = _ranked([*found, *_bisected(better, goal, run, report)])


def find_smallest(
    num_gpus: int, ranks: Sequence[Ranks], rate: float, goal: SearchGoal, run: Run, report: Report
) -> list[LayoutFinding]:
    """Return the layouts of the fewest GPUs, up to `num_gpus`, that meet the level at `rate`, best first. More GPUs are
    taken to serve no less, so the number is bisected. Raises ConfigError."""
    smallest = min(each.tensor_parallel for each in ranks)
    sizes = range(smallest, num_gpus + 1, smallest)
    low, high = 0, len(sizes) - 1
    met: dict[int, list[LayoutFinding]] = {}
    while low <= high:
        # The largest first: where it fails, nothing else is of use.
        middle = high if not met else (low + high) // 2
        report(f"{count(sizes[middle], 'GPU')} at {rate_text(rate)} requests/s")
        found = _holding(layouts_of(sizes[middle], ranks), rate, goal, run, report)
        if found[0].rate:
            met[middle] = [each for each in found if each.rate]
            high = middle - 1
        elif not met:
            raise _unmet(found, goal)
        else:
            low = middle + 1
    if any(each.best.is_burst for each in met[min(met)]):
        raise ConfigError(
            f"at {rate_text(rate)} requests/s the {count(goal.num_requests, 'request')} of the load come in a burst, "
            "long before they are answered: give a longer load (--num-requests, or a longer --trace), or a lower --rate"
        )
    layouts = [each.layout for each in met[min(met)]]
    return _bisected(dict.fromkeys(layouts, rate), goal, run, report)


def _holding(layouts: Sequence[Layout], rate: float, goal: SearchGoal, run: Run, report: Report) -> list[LayoutFinding]:
    """Return the best layouts at one rate, best first."""
    found: list[LayoutFinding] = []
    for num, part in [*_races(goal.num_requests), (goal.num_requests, 1.0)]:
        found = _ranked(_reported([Question(layout, num, (rate,)) for layout in layouts], run, report))
        layouts = [each.layout for each in _kept(found, part)]
    return found


def _bisected(firsts: Mapping[Layout, float], goal: SearchGoal, run: Run, report: Report) -> list[LayoutFinding]:
    """Return the goodput of layouts, best first. `firsts`: rate to begin with."""
    questions = [
        Question(layout, goal.num_requests, search=Search(goal.level.share, first, WIDTH, 1, MOST_STEPS))
        for layout, first in firsts.items()
    ]
    return _ranked(_reported(questions, run, report))


def _race(firsts: Mapping[Layout, float], num: int, goal: SearchGoal, run: Run, report: Report) -> list[LayoutFinding]:
    """Return layouts, best first. `firsts`: rates that they are expected to serve."""
    measured: dict[Layout, tuple[Measured, ...]] = dict.fromkeys(firsts, ())
    groups = {layout.group: _Group([each for each in firsts if each.group == layout.group], 0.0) for layout in firsts}
    for group in groups.values():
        # One that few are expected to hold is enough.
        rates = sorted((firsts[layout] for layout in group.racing), reverse=True)
        group.rate = rates[:NUM_OF_GROUP][-1]
    for _ in range(MOST_STEPS):
        questions = [Question(each, num, (group.rate,)) for group in groups.values() for each in group.racing]
        if not questions:
            break
        for each in _reported(questions, run, report):
            measured[each.layout] += each.measured
        for group in groups.values():
            group.go_on([each for each in group.racing if measured[each][-1].share >= goal.level.share])
    return _ranked(_finding(layout, each, goal.level.share) for layout, each in measured.items())


@dataclass(slots=True)
class _Group:
    """Layouts that race, and their rate."""

    racing: Sequence[Layout]
    rate: float
    has_risen: bool = False
    has_fallen: bool = False

    def go_on(self, holding: Sequence[Layout]) -> None:
        """Choose the next rate, and who is measured there. `holding`: the level at this rate."""
        if not holding and not self.has_risen:
            self.has_fallen = True
            self.rate *= DOWN
        elif self.has_fallen or len(holding) <= NUM_OF_GROUP:
            self.racing = ()
        else:
            self.has_risen = True
            self.racing = holding
            self.rate *= UP


def _finding(layout: Layout, measured: Sequence[Measured], share: float) -> LayoutFinding:
    return LayoutFinding(layout, tuple(measured), bracket_of(_trials(measured), share))


def _trials(measured: Iterable[Measured], *, bursts_fail: bool = False) -> list[Trial]:
    return [Trial(at.rate, 0 if bursts_fail and at.is_burst else at.good, at.sent) for at in measured]


def _races(num_requests: int) -> list[tuple[int, float]]:
    """Number of requests, and part of the layouts that goes on, of each race."""
    races = [(int(num_requests * part), keep) for part, keep in RACES]
    return [each for each in races if each[0] >= SHORTEST_RACE]


def _able(layouts: Sequence[Layout], goal: SearchGoal, run: Run, report: Report) -> list[Layout]:
    """Layouts that meet the level where requests hardly meet each other. Raises ConfigError where there is none."""
    num = min(NUM_IDLE, goal.num_requests)
    found = list(run([Question(layout, num, (goal.idle_rate,)) for layout in layouts]))
    able = [each.layout for each in found if each.rate]
    if not able:
        raise _unmet(_ranked(found), goal, "even ")
    if len(able) < len(layouts):
        report(f"{len(layouts) - len(able)} of {count(len(layouts), 'layout')} miss the level even without load")
    return able


def _reported(questions: Sequence[Question], run: Run, report: Report) -> list[LayoutFinding]:
    total, num = len(questions), questions[0].num
    report(f"{count(total, 'layout')}, {count(num, 'request')}")
    found: list[LayoutFinding] = []
    for number, each in enumerate(run(questions), 1):
        found.append(each)
        best = each.best
        goodput = f"{rate_text(each.rate)} requests/s"
        if len(each.measured) == 1 or not each.rate:
            goodput = f"{best.share:.0%} at {rate_text(best.rate)} requests/s"
        report(f"  {number}/{total} {each.layout}: {goodput}")
    return found


def _ranked(found: Iterable[LayoutFinding]) -> list[LayoutFinding]:
    return sorted(found, key=lambda each: each.merit, reverse=True)


def _kept(ranked: Sequence[LayoutFinding], share: float) -> list[LayoutFinding]:
    """The best of all, and the best of each group."""
    num = max(round(len(ranked) * share), NUM_FINALISTS)
    groups = Counter[Group]()
    kept: list[LayoutFinding] = []
    for place, each in enumerate(ranked):
        if place < num or groups[each.layout.group] < NUM_OF_GROUP:
            kept.append(each)
        groups[each.layout.group] += 1
    return kept


def _unmet(ranked: Sequence[LayoutFinding], goal: SearchGoal, even: str = "") -> ConfigError:
    nearest = max(ranked, key=lambda each: each.best.share)
    best = nearest.best
    return ConfigError(
        f"no layout meets {goal.level} of the requests {even}at {rate_text(best.rate)} requests/s. The best there is "
        f"{nearest.layout}: {best.share:.0%} meet it, p50 of TTFT {best.ttft_ms[0]:.0f} ms and TPOT "
        f"{best.tpot_ms[0]:.1f} ms. Raise --ttft or --tpot, lower --share or --rate, or give more or faster --gpus"
    )
