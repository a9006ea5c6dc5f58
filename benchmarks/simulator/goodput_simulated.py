"""Goodput of layouts of a cluster, simulated: the requests within a service level, by model, trace, rate and link.

    python -m benchmarks.simulator.goodput_simulated --azure FILE.csv --mooncake FILE.jsonl [--model 8b 70b 135m]
        [--link-gbit 400 100 25] [--rates ...] [--requests 2000] [--layout ...] [--profile FILE] [--json F.json]

8b and 70b: Llama's shapes on eight workers of H100s (one each, and four), the traces at their own lengths. 135m: the
machine of --profile, with the layouts, lengths and rates of goodput.py. `predicted`: routes by predicted times
(router.predict); else by roles. Share of the requests within the level, of all. Every figure repeats.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.serving.goodput_loads import AZURE_SCALE, MOONCAKE_SCALE, MOST_INPUT
from diptych.cluster.bench.traces import TraceLimits
from diptych.cluster.common.config_file import build
from diptych.cluster.simulate.build import Hardware, simulate
from diptych.cluster.simulate.gpus import gpu_of
from diptych.cluster.simulate.load import SimulatedRequest, trace_load
from diptych.cluster.simulate.profile import read_profile

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MEASURED = Path(__file__).parents[1] / "profiles" / "135m-2-cores.json"
PREDICTED = " predicted"
Pools = Mapping[str, Mapping[str, Any]]


def shape(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int) -> dict[str, Any]:
    """config.json of a model of Llama's architecture."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": hidden < 1024,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 1,
    }


def _split(num_prefill: int, num_decode: int, **settings: Any) -> Pools:
    return {"prefill": {"replicas": num_prefill} | settings, "decode": {"replicas": num_decode} | settings}


def _mixed(num: int, **settings: Any) -> Pools:
    return {"mixed": {"replicas": num} | settings}


def of_eight(**settings: Any) -> dict[str, Pools]:
    """Layouts of eight workers."""
    splits = {f"{n}p{8 - n}d": _split(n, 8 - n, **settings) for n in (2, 4, 6)}
    return {**splits, "8 mixed": _mixed(8, **settings)}


@dataclass(frozen=True)
class Scenario:
    """A model on its hardware. `lengths`: by trace, the scale and the longest prompt (0: any)."""

    config: Mapping[str, Any]
    layouts: Mapping[str, Pools]
    level: Mapping[str, float]  # seconds
    rates: Mapping[str, Sequence[float]]
    lengths: Mapping[str, tuple[float, int]] = field(default_factory=lambda: {"azure": (1.0, 0), "mooncake": (1.0, 0)})
    gpu: str | None = "H100"


SCENARIOS = {
    "8b": Scenario(
        shape(4096, 14336, 32, 32, 8, 128256, 131072),
        of_eight(),
        {"ttft": 1.0, "tpot": 0.025},
        {"azure": (100, 150), "mooncake": (4, 7)},
    ),
    "70b": Scenario(
        shape(8192, 28672, 80, 64, 8, 128256, 131072),
        of_eight(tensor_parallel=4),
        {"ttft": 2.0, "tpot": 0.05},
        {"azure": (45, 60), "mooncake": (1.5, 3)},
    ),
    "135m": Scenario(
        shape(576, 1536, 30, 9, 3, 49152, 8192),
        {"1p1d": _split(1, 1, threads=1), "2 mixed": _mixed(2, threads=1), "1 mixed": _mixed(1, threads=2)},
        {"ttft": 0.5, "tpot": 0.05},
        {"azure": (3, 5, 7), "mooncake": (1.5, 2.5, 3.5)},
        {"azure": (AZURE_SCALE, 0), "mooncake": (MOONCAKE_SCALE, MOST_INPUT)},
        None,
    ),
}


@dataclass(frozen=True)
class Point:
    model: str
    trace: str
    rate: float
    link_gbit: float | None  # None: the profile's
    layout: str
    good: float
    ttft_ms: Sequence[float]  # p50 and p99
    tpot_ms: Sequence[float]


def run(
    name: str, trace: str, load: Sequence[SimulatedRequest], where: tuple[float, float | None, str], args: Any
) -> Point:
    """`where`: rate, link and layout."""
    scenario, (rate, gbit, layout) = SCENARIOS[name], where
    hardware = Hardware(gpu_of(scenario.gpu)) if scenario.gpu else Hardware.of(read_profile(args.profile))
    if gbit is not None:
        hardware = Hardware(hardware.steps, gbit * 1e9 / 8)
    folder = args.folder / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(scenario.config))
    level = {"ttft_s": scenario.level["ttft"], "tpot_s": scenario.level["tpot"]}
    router = {"predict": layout.endswith(PREDICTED), "max_requests": 1 << 20}
    pools = scenario.layouts[layout.removesuffix(PREDICTED)]
    kind = {"device": "cuda", "dtype": "bfloat16"} if scenario.gpu else {}
    config = build({"model": str(folder), "pools": pools, "router": router, "service_level": level} | kind)
    figures = simulate(config, hardware, load, scenario.level)
    spreads = [[figures.spreads[metric].percentiles[p] for p in (50, 99)] for metric in ("ttft", "tpot")]
    return Point(name, trace, rate, gbit, layout, figures.good, *spreads)


def run_all(args: argparse.Namespace) -> Iterator[Point]:
    for name in args.model:
        scenario = SCENARIOS[name]
        layouts = [*scenario.layouts, *(layout + PREDICTED for layout in scenario.layouts)]
        for trace, path in (("azure", args.azure), ("mooncake", args.mooncake)):
            for rate in (args.rates or scenario.rates[trace]) if path else ():
                scale, longest = scenario.lengths[trace]
                limits = TraceLimits(args.requests, length_scale=scale, max_input=longest)
                load = trace_load(trace, path, limits, rate)
                for gbit in args.link_gbit if scenario.gpu else (None,):
                    for layout in layouts:
                        if not args.layout or layout in args.layout:
                            yield run(name, trace, load, (rate, gbit, layout), args)


def as_markdown(points: Sequence[Point]) -> Iterator[str]:
    """A table for each model: a row for each trace, rate and link."""
    for name in dict.fromkeys(point.model for point in points):
        here = [point for point in points if point.model == name]
        layouts = list(dict.fromkeys(point.layout for point in here))
        yield f"| {name}: trace, rate, link | {' | '.join(layouts)} |"
        yield "|---" + "|--:" * len(layouts) + "|"
        rows: dict[tuple[str, float, float | None], dict[str, float]] = {}
        for point in here:
            rows.setdefault((point.trace, point.rate, point.link_gbit), {})[point.layout] = point.good
        for (trace, rate, gbit), row in rows.items():
            link = "" if gbit is None else f", {gbit:g} Gbit/s"
            cells = [f"**{good:.0%}**" if good == max(row.values()) else f"{good:.0%}" for good in row.values()]
            yield f"| {trace} {rate:g}/s{link} | {' | '.join(cells)} |"
        yield ""


def parse_args(texts: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--azure", type=Path, help="Azure LLM inference trace 2023, CSV")
    parser.add_argument("--mooncake", type=Path, help="Mooncake trace, JSON lines")
    parser.add_argument("--model", nargs="+", choices=SCENARIOS, default=["8b", "70b"])
    parser.add_argument("--layout", nargs="+", help="names of the table's columns  [default: all]")
    parser.add_argument("--link-gbit", type=float, nargs="+", default=[400.0, 100.0, 25.0], help="of each worker")
    parser.add_argument("--rates", type=float, nargs="+", help="requests/s  [default: some for each trace]")
    parser.add_argument("--requests", type=int, default=2000, help="of each trace, its first")
    parser.add_argument("--profile", type=Path, default=MEASURED, help="of 135m's machine")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(texts)
    if args.azure is None and args.mooncake is None:
        parser.error("give --azure FILE or --mooncake FILE")
    return args


def main(texts: Sequence[str] | None = None) -> None:
    args = parse_args(texts)
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        points = list(run_all(args))
    publish(points, as_markdown(points), args.json)


def publish(points: Sequence["DataclassInstance"], table: Iterable[str], path: Path | None) -> None:
    """Print the table; write the points to a file, as JSON."""
    if path:
        path.write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n")
    print("\n".join(table))


if __name__ == "__main__":
    main()
