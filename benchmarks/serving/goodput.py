"""Goodput of layouts of a cluster on this machine: requests within a service level, by load and rate, in one run.

    python -m benchmarks.serving.goodput --azure FILE.csv --mooncake FILE.jsonl [--model DIR] [--seconds 60]
        [--layout 1p1d ...] [--load swing ...] [--rates 2 3] [--vllm ENV]
        [--json F.json] [--markdown F.md] [--plot F.svg] [-- more flags of serve]

Each load is sent at each rate to each layout in turn. A fixed layout routes by roles: one measured run, which every
service level scores. The dial routes by predicted times, aims at the level and shares its cores: a run for each. Load
generator, traces and figures are those of `diptych bench`. A layout of Diptych is started by `diptych serve` for each
run and stopped after it: workers hold their cores by locks, so that a second cluster would run without cores of its
own. vLLM (ENV: see versus_vllm.py) is started once and stopped (SIGSTOP) while others run. `--endpoint NAME=URL` adds
a server that runs already. Before a run the server gets the same load, with other prompts, for --warm-up seconds; vLLM
before its first run a whole run of other prompts. Each rate has prompts of its own.

    share     requests that met the level, of those sent (a failed one has not met it)
    goodput   the same per second of sending

Without --model: random weights of the shape of a 135 M model with a small vocabulary. All compute in bfloat16.
"""

import argparse
import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from diptych.cluster.bench.measure import Connection, Screen, connected, measure
from diptych.cluster.bench.report import Result, to_json
from diptych.cluster.bench.run import Pace
from diptych.cluster.bench.settings import Target, parse_url
from diptych.cluster.bench.types import Session

from .goodput_loads import LOADS, Asked
from .goodput_report import DIAL, LEVELS, Run, as_markdown, draw, score
from .servers import Server, diptych, running, vllm
from .versus_vllm import awake

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny"
TIMEOUT_S = 60.0  # of a request; it has missed every level long before
WARM_SEED = 1_000_003  # added to the seed of the load
RATES: Mapping[str, Sequence[float]] = {
    "azure": (10.0, 13.0, 16.0),
    "mooncake": (2.0, 3.0, 4.0),
    "swing": (3.0, 5.0, 7.0),
    "document": (6.0, 9.0, 12.0),
}


@dataclass(frozen=True)
class Layout:
    """Layout of a cluster. `threads`: of each worker; `flags`: more ones of `diptych serve`; `is_dial`: it knows the
    service level and routes by it; `moves`: the dial moves budgets, too."""

    pools: Mapping[str, int]
    threads: int
    flags: Sequence[str] = ()
    is_dial: bool = False
    moves: bool = True


LAYOUTS = {
    "1p1d": Layout({"prefill": 1, "decode": 1}, 1),
    "2mixed": Layout({"mixed": 2}, 1),
    "1mixed": Layout({"mixed": 1}, 2),
    DIAL: Layout({"mixed": 2}, 1, ["--share-cores"], is_dial=True),
    # They begin with the pools that `diptych serve` has without flags.
    "1p1d dial": Layout({"prefill": 1, "decode": 1}, 1, ["--share-cores"], is_dial=True),
    "1p1d predicted": Layout({"prefill": 1, "decode": 1}, 1, ["--share-cores"], is_dial=True, moves=False),
}
FIXED = ("1p1d", "2mixed", "1mixed")
VLLM = "vllm"
PEERS = {"best fixed": FIXED, VLLM: (VLLM,)}  # of the dial


class Servers:
    """The servers of a run, by name: each reachable in `serving`, one at a time."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self._args = args
        self._running: dict[str, str] = dict(text.partition("=")[::2] for text in args.endpoint)
        self._vllm: Server | None = None
        if args.vllm:
            peer = vllm(args.vllm, args.model, args.cores, args.kv_gib)
            self._vllm = stack.enter_context(running(peer, args.cores, args.logs))
            self._vllm.pause()

    @property
    def names(self) -> list[str]:
        return [*self._args.layout, *([VLLM] if self._vllm else []), *self._running]

    @property
    def aims(self) -> Iterator[tuple[str, str | None]]:
        """Each server with each level at which it is to aim; None: it knows of none."""
        for name in self.names:
            aims = LEVELS if name in LAYOUTS and LAYOUTS[name].is_dial else (None,)
            yield from ((name, level) for level in aims)

    @contextmanager
    def serving(self, name: str, level: str | None = None) -> Generator[str]:
        """URL of the server, while it runs. `level`: at which it aims."""
        if name in self._running:
            yield self._running[name]
        elif name == VLLM and self._vllm:
            with awake(self._vllm):
                yield self._vllm.url
        else:
            with self._start(LAYOUTS[name], level) as server:
                yield server.url

    @contextmanager
    def _start(self, layout: Layout, level: str | None) -> Generator[Server]:
        args = self._args
        settings: dict[str, Any] = {"router": {"predict": layout.is_dial}, "dial": layout.is_dial and layout.moves}
        if level is not None:
            settings["service_level"] = {f"{metric}_s": seconds for metric, seconds in LEVELS[level].items()}
        with tempfile.TemporaryDirectory() as home:
            config = Path(home) / "cluster.yaml"
            config.write_text(json.dumps(settings))  # JSON is YAML
            flags = ["--config", str(config), *layout.flags, *args.flags]
            command = diptych(args.model, layout.pools, layout.threads, args.kv_gib, flags)
            command = replace(command, environment={"DIPTYCH_HOME": home})
            with running(command, args.cores, args.logs) as server:
                yield server


def run_all(args: argparse.Namespace, screen: Screen) -> Iterator[Run]:
    with ExitStack() as stack:
        servers, seen = Servers(args, stack), set[str]()
        for load in args.load:
            for number, rate in enumerate(args.rates or RATES[load]):
                seed = args.seed + number  # vLLM goes on from rate to rate, with what its prefix cache holds
                asked = Asked(rate, args.seconds, seed, vocab_size(args.model), args.azure, args.mooncake)
                for name, level in servers.aims:
                    with servers.serving(name, level) as url:
                        if name == VLLM and name not in seen:
                            others = replace(asked, seed=seed + 2 * WARM_SEED)
                            asyncio.run(run_one(url, load, others, args.warm_up, screen))
                        seen.add(name)
                        result = asyncio.run(run_one(url, load, asked, args.warm_up, screen))
                    good = score(result) if level is None else {level: score(result)[level]}
                    run = Run(name, load, rate, args.seconds, to_json(result) | {"settings": {}}, good)
                    screen.log(run.line())
                    yield run
                    if result.is_interrupted:
                        return


async def run_one(url: str, load: str, asked: Asked, warm_up_s: float, screen: Screen) -> Result:
    """Send a load, after a shorter one of other prompts that is not counted."""
    more = {"temperature": 0.0, "ignore_eos": True}
    async with connected(
        Target(parse_url(url), "completions", None, None, None, asked.vocab_size, TIMEOUT_S, more)
    ) as connection:
        if warm_up_s:
            warm = replace(asked, seconds=warm_up_s, seed=asked.seed + WARM_SEED)
            await send(connection, LOADS[load](warm), screen)
        return await send(connection, LOADS[load](asked), screen)


async def send(connection: Connection, sessions: Sequence[Session], screen: Screen) -> Result:
    starts_s = [session.at_s or 0.0 for session in sessions]
    return await measure(connection, sessions, Pace(starts_s, 0), {}, screen)


def vocab_size(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def make_model(folder: Path) -> Path:
    """Checkpoint of random weights, with the tokenizer of the tiny model: prompts are ids."""
    from benchmarks.transfer.overlap import make_checkpoint

    make_checkpoint(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    return folder


def parse_args(texts: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face checkpoint  [default: a random one is made]")
    parser.add_argument("--azure", type=Path, help="Azure LLM inference trace 2023, CSV")
    parser.add_argument("--mooncake", type=Path, help="Mooncake trace, JSON lines")
    parser.add_argument("--layout", "--only", nargs="*", choices=LAYOUTS, default=[*FIXED, DIAL])
    parser.add_argument("--load", nargs="+", choices=LOADS, help="[default: those whose files are given]")
    parser.add_argument("--rates", type=float, nargs="+", help="requests/s, of every load  [default: three of each]")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of sending in each run")
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds of warm-up with the same load")
    parser.add_argument("--vllm", type=Path, help="virtual environment with vLLM's CPU build")
    parser.add_argument("--endpoint", action="append", default=[], metavar="NAME=URL", help="a running server")
    parser.add_argument("--kv-gib", type=int, default=2, help="KV cache of each worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="folder for the servers' output  [default: a new one]")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="the tables  [default: standard output]")
    parser.add_argument("--plot", type=Path, help="shares by rate, SVG")
    parser.add_argument("flags", nargs="*", help="flags for `diptych serve`, after --")
    args = parser.parse_args(texts)
    files = {"azure": args.azure, "mooncake": args.mooncake}
    args.load = args.load or [load for load in LOADS if files.get(load, True)]
    for load in args.load:
        if files.get(load, True) is None:
            parser.error(f"--load {load} needs its trace: give --{load} FILE")
    args.cores = sorted(os.sched_getaffinity(0))
    return args


def write(args: argparse.Namespace, runs: Sequence[Run]) -> None:
    """Write what was measured so far, so that a run that is ended loses nothing."""
    if args.json:
        levels = {name: dict(level) for name, level in LEVELS.items()}
        rows: dict[str, Any] = {"levels": levels, "flags": args.flags, "runs": [asdict(run) for run in runs]}
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(as_markdown(runs, PEERS))
    if args.plot:
        args.plot.write_text(draw(runs))


def main(texts: Sequence[str] | None = None) -> None:
    args = parse_args(texts)
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        args.model = args.model or make_model(Path(folder) / "model")
        args.logs = args.logs or Path(tempfile.mkdtemp(prefix="goodput-logs-"))
        args.logs.mkdir(parents=True, exist_ok=True)
        screen = Screen(Console(stderr=True, force_terminal=False), Console(stderr=True))
        screen.log(f"{args.model.name}, bfloat16, cores {args.cores}; logs in {args.logs}")
        runs: list[Run] = []
        for run in run_all(args, screen):
            runs.append(run)
            write(args, runs)
    if not args.markdown:
        print(as_markdown(runs, PEERS))


if __name__ == "__main__":
    main()
