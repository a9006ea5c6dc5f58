"""Runs `diptych bench --find-rate`: finds the highest rate at which each of several endpoints keeps the service level.

connect to each endpoint, warm up  ──>  one trial at each in turn, until every search has ended  ──>  table, JSON, plot

Endpoints take turns, so that only one is loaded at a time and a machine that changes its speed changes it for all. Each
trial has its own prompts, or the prefix cache would know them; all endpoints get the same ones.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from rich.table import Table

from ...workers.common.errors import Unavailable
from ...workers.common.event_loop import new_event_loop
from .bench import allow_many_sockets, make_sessions, warm_up
from .measure import Connection, Screen, connected, measure
from .plot import RatePoint, draw_sweep, write_figure
from .rate_search import Bracket, Search, Trial, bracket_of, next_rate, share_at
from .report import Result, to_json
from .run import Pace
from .settings import BenchSettings, Target, check_output_files
from .stats import BURST, alone, is_good
from .types import Session
from .workloads import arrivals, stretched

SEEDS_APART = 1_000_003  # seeds of two trials; so far apart that neighbouring values of --seed share none
LEAST_ALONE = 10  # requests during which no other ran, to tell that lower rates are of no use


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """`load`: workload, arrival and service level; its rate is the first one. `targets`: by name, instead of its
    target. `shares`: of the requests that must meet the level, 0 to 1. `width`: relative, at which a search ends."""

    load: BenchSettings
    targets: Mapping[str, Target]
    shares: Sequence[float]
    width: float


@dataclass(slots=True)
class EndpointSearch:
    """Search at one endpoint. Three lists of the same length: what was measured, its figures, and whether all its
    requests were due within a part of an answer's time: a burst, not a rate."""

    name: str
    settings: SweepSettings
    connection: Connection
    trials: list[Trial] = field(default_factory=list[Trial])
    results: list[Result] = field(default_factory=list[Result])
    bursts: list[bool] = field(default_factory=list[bool])

    def next_rate(self) -> float | None:
        arrival, width = self.settings.load.arrival, self.settings.width
        searches = [
            Search(share, arrival.rate or 1.0, width) for share in self.settings.shares if not self.is_hopeless(share)
        ]
        return next((rate for each in searches if (rate := next_rate(self.trials, each)) is not None), None)

    def bracket(self, share: float) -> Bracket:
        return bracket_of(self.trials, share)

    def is_hopeless(self, share: float) -> bool:
        """Return whether no rate held the share, and not half of it by requests during which no other ran: at lower
        rates, at which a trial takes longer and longer, they would not do better."""
        if not self.trials or self.bracket(share).holds is not None:
            return False
        lowest = min(trial.rate for trial in self.trials)
        both = zip(self.trials, self.results, strict=True)
        found = [reply for trial, result in both if trial.rate == lowest for reply in alone(result.replies)]
        levels = self.settings.load.levels
        num_good = sum(reply.failure is None and is_good(reply, levels) for reply in found)
        return len(found) >= LEAST_ALONE and num_good < share * len(found) / 2

    def points(self) -> list[RatePoint]:
        """Figures of all trials of each rate together."""
        return [
            RatePoint(rate, share_at(self.trials, rate), self._goodput(rate))
            for rate in sorted({trial.rate for trial in self.trials})
        ]

    def _goodput(self, rate: float) -> float:
        both = zip(self.trials, self.results, strict=True)
        summaries = [result.summary for trial, result in both if trial.rate == rate]
        return sum(each.good or 0 for each in summaries) / sum(each.duration_s for each in summaries)

    def sessions(self, number: int) -> list[Session]:
        """Sessions of a trial, 0 for the warm-up."""
        work = self.settings.load.work
        work = replace(work, seed=work.seed + number * SEEDS_APART)
        return make_sessions(work, self.connection.source, self.connection.tokenizer)

    async def run_trial(self, rate: float, screen: Screen) -> bool:
        """Returns whether it was interrupted; then it does not count. Raises Unavailable."""
        load, number = self.settings.load, len(self.trials) + 1
        sessions = self.sessions(number)
        starts_s = starts_at(rate, sessions, load)
        pace = Pace(starts_s, 0, load.arrival.think_s, load.arrival.max_s)
        result = await measure(self.connection, sessions, pace, load.levels, screen)
        if result.is_interrupted:
            return True
        _check_answers(self.name, rate, result)
        trial = Trial(rate, result.summary.good or 0, result.summary.completed + result.summary.failed)
        self.trials.append(trial)
        self.results.append(result)
        # As they were due, not as they were sent: a client that falls behind must not make a burst look like a rate.
        self.bursts.append(max(starts_s) - min(starts_s) < BURST * result.summary.spreads["e2el"].mean / 1000)
        screen.log(f"{self.name}: {rate:.3g} requests/s: {trial.good} of {trial.sent} met the level")
        if any(map(self.is_hopeless, self.settings.shares)):
            screen.log(f"{self.name}: requests that ran alone miss the level, too: no lower rate is measured")
        return False


def _check_answers(name: str, rate: float, result: Result) -> None:
    """Raise Unavailable where no request succeeded, for another reason than too high a rate."""
    failures = [reply.failure for reply in result.replies if reply.failure is not None]
    if result.summary.completed or not failures or any(failure.may_be_load for failure in failures):
        return
    first = failures[0]
    raise Unavailable(f"{name}: no request succeeded at {rate:.3g} requests/s: {first.kind}: {first.message}")


def starts_at(rate: float, sessions: Sequence[Session], load: BenchSettings) -> list[float]:
    """Start times at a rate: those of the trace, stretched; or random ones."""
    times_s = [session.at_s for session in sessions if session.at_s is not None]
    if times_s and max(times_s) > min(times_s):
        return stretched(times_s, rate)
    rng = np.random.default_rng((load.work.seed, 1))
    return arrivals(len(sessions), rate, load.arrival.burstiness, rng)


def run_sweep(settings: SweepSettings, screen: Screen) -> bool:
    """Search and report. Returns whether it was interrupted. Raises DiptychErrors."""
    load, date = settings.load, datetime.now(UTC).isoformat(timespec="seconds")
    check_output_files(load.json_file, load.plot_file)
    allow_many_sockets()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        searches, is_interrupted = runner.run(_sweep(settings, screen))
    screen.out.print(_table(settings, searches), soft_wrap=True)
    if is_interrupted:
        screen.out.print("interrupted: the searches had not ended")
    for line in _notes(settings, searches):
        screen.out.print(line, soft_wrap=True)
    if load.json_file is not None:
        row = {"date": date, "settings": dict(load.shown), "interrupted": is_interrupted}
        row |= {"endpoints": [_search_json(settings, search) for search in searches]}
        load.json_file.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    if load.plot_file is not None:
        write_figure(draw_sweep({search.name: search.points() for search in searches}, settings.shares), load.plot_file)
    return is_interrupted


async def _sweep(settings: SweepSettings, screen: Screen) -> tuple[list[EndpointSearch], bool]:
    async with AsyncExitStack() as stack:
        searches: list[EndpointSearch] = []
        for name, target in settings.targets.items():
            search = EndpointSearch(name, settings, await stack.enter_async_context(connected(target)))
            await warm_up(search.connection, search.sessions(0)[0], settings.load.work.seed, settings.load.num_warmup)
            searches.append(search)
        while any(search.next_rate() is not None for search in searches):
            for search in searches:
                rate = search.next_rate()
                if rate is not None and await search.run_trial(rate, screen):
                    return searches, True
    return searches, False


def _table(settings: SweepSettings, searches: Sequence[EndpointSearch]) -> Table:
    levels = ", ".join(f"{metric} <= {level_s * 1000:g} ms" for metric, level_s in settings.load.levels.items())
    table = Table(box=None, pad_edge=False, header_style="dim", title=f"highest rate, requests/s: {levels}")
    table.add_column("endpoint", no_wrap=True)
    for share in settings.shares:
        table.add_column(f"for {share * 100:g} %", justify="right")
    table.add_column("trials", justify="right")
    for search in searches:
        found = (_shown(search.bracket(share)) for share in settings.shares)
        table.add_row(search.name, *found, str(len(search.trials)))
    return table


def _notes(settings: SweepSettings, searches: Sequence[EndpointSearch]) -> list[str]:
    """Sentences on rates at which a trial was a burst."""
    notes: dict[str, None] = {}
    for search in searches:
        rates = {rate for share in settings.shares if (rate := search.bracket(share).holds) is not None}
        for trial, is_burst in zip(search.trials, search.bursts, strict=True):
            if is_burst and trial.rate in rates:
                at = f"at {trial.rate:.3g} requests/s a trial is over before its requests are answered"
                notes[f"note: {search.name}: {at}: raise --num-requests to measure what lasts"] = None
    return list(notes)


def _shown(found: Bracket) -> str:
    if found.holds is None:
        return "none" if found.fails is None else f"below {found.fails:.3g}"
    return f"{found.holds:.3g}" if found.fails is not None else f"at least {found.holds:.3g}"


def _search_json(settings: SweepSettings, search: EndpointSearch) -> dict[str, Any]:
    target = settings.targets[search.name]
    return {
        "name": search.name,
        "url": target.url.geturl(),
        "model": search.connection.asking.model,
        "api": target.api,
        "found": [_found_json(search, share) for share in settings.shares],
        "trials": [
            {"rate": trial.rate, "sent": trial.sent, "good": trial.good} | _figures(result)
            for trial, result in zip(search.trials, search.results, strict=True)
        ],
    }


def _found_json(search: EndpointSearch, share: float) -> dict[str, Any]:
    found = search.bracket(share)
    measured = None if found.holds is None else share_at(search.trials, found.holds)
    return {"share": share, "rate": found.holds, "fails_at": found.fails, "measured_share": measured}


def _figures(result: Result) -> dict[str, Any]:
    return {name: value for name, value in to_json(result).items() if name not in {"settings", "requests"}}
