"""Flags of `diptych bench`, and their checks. Heavy modules are imported when they are needed."""

import json
import math
import sys
from argparse import Namespace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ...workers.common.errors import ConfigError
from ...workers.common.exit_codes import INTERRUPTED

if TYPE_CHECKING:
    from .measure import Screen
    from .settings import BenchSettings, Target, Work
    from .sweep import SweepSettings

SHARES = (90.0, 99.0)  # per cent


class Workload(Enum):
    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    MULTI_TURN = "multi-turn"
    SHAREGPT = "sharegpt"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    MOONCAKE = "mooncake"
    BAILIAN = "bailian"


class Api(Enum):
    COMPLETIONS = "completions"
    CHAT = "chat"


def bench(  # noqa: PLR0913, PLR0917  typer makes a flag of each parameter
    more_levels: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    url: Annotated[str, typer.Option(help="http[s]://HOST:PORT of an OpenAI API, or grpc[s]://HOST:PORT.")] = (
        "http://127.0.0.1:8000"
    ),
    api: Annotated[Api | None, typer.Option(help="[default: chat for conversations, else completions]")] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model there.  [default: the served one]")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="DIPTYCH_API_KEY", help="Other users of this machine can read a flag.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder with the model's tokenizer.json, or `tiny`: prompts are text, else ids.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Ids of prompts are below it.")] = 1000,
    workload: Annotated[Workload, typer.Option()] = Workload.RANDOM,
    file: Annotated[Path | None, typer.Option(help="Of sharegpt (JSON), or a trace (CSV, JSON lines).")] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Or conversations.")] = 100,
    input_tokens: Annotated[str, typer.Option(help="Of each prompt or turn: N, or a range N-M.")] = "128",
    output_tokens: Annotated[str, typer.Option(help="Of each answer: N, or a range N-M.")] = "64",
    prefix_tokens: Annotated[int, typer.Option(min=1, help="shared-prefix: before each prompt.")] = 256,
    num_prefixes: Annotated[int, typer.Option(min=1, help="shared-prefix: different ones.")] = 4,
    turns: Annotated[str, typer.Option(help="multi-turn: of a conversation, N or N-M.")] = "4",
    think_time: Annotated[float, typer.Option(min=0, help="Seconds from an answer to the next turn.")] = 0.0,
    time_scale: Annotated[float, typer.Option(min=0, help="Traces: gaps are multiplied by it.")] = 1.0,
    length_scale: Annotated[float, typer.Option(min=0, help="Traces: lengths are multiplied by it.")] = 1.0,
    max_input_tokens: Annotated[int, typer.Option(min=0, help="Files: longer prompts are cut; 0: not.")] = 0,
    max_output_tokens: Annotated[int, typer.Option(min=0, help="Files: longer answers are cut; 0: not.")] = 0,
    rate: Annotated[float | None, typer.Option(help="Requests (or conversations) begun a second.")] = None,
    burstiness: Annotated[float, typer.Option(help="Gamma shape of the gaps; 1: Poisson, less: bursts.")] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="At most at once.  [default: 8, or any at a rate]")
    ] = None,
    max_seconds: Annotated[float, typer.Option(min=0, help="Begin nothing after this; 0: no limit.")] = 0.0,
    goodput: Annotated[list[str] | None, typer.Option(help="Service level, ms: ttft:500 tpot:50 e2el:9000.")] = None,
    find_rate: Annotated[
        bool, typer.Option("--find-rate", help="Find the highest rate that keeps --goodput; --rate is the first one.")
    ] = False,
    share: Annotated[
        list[float] | None, typer.Option(help="find-rate: of the requests, %; repeat it.  [default: 90, 99]")
    ] = None,
    endpoint: Annotated[
        list[str] | None, typer.Option(help="find-rate: NAME=URL, instead of --url; repeated: in turn.")
    ] = None,
    within: Annotated[float, typer.Option(min=0.1, help="find-rate: % between what holds and what fails.")] = 5.0,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of the full length.")] = True,
    extra_body: Annotated[str | None, typer.Option(help="JSON object: more fields of each call.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds a request.")] = 600.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before, not counted.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Other prompts and gaps.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the distributions there (.svg).")] = None,
) -> None:
    """Measure an endpoint under load: TTFT, TPOT, ITL, throughput, goodput. Ctrl-C shows what was measured so far."""
    flags = Namespace(**locals())
    from .measure import Screen

    out = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, markup=False)
    if _run(flags, Screen(out, Console(stderr=True))):
        raise typer.Exit(INTERRUPTED)


def _run(flags: Namespace, screen: "Screen") -> bool:
    """Returns whether it was interrupted."""
    if flags.find_rate:
        from .sweep import run_sweep

        return run_sweep(_sweep_settings(flags), screen)
    if flags.share or flags.endpoint:
        raise ConfigError("--share and --endpoint need --find-rate; for a single measurement use --url")
    from .bench import run

    return run(_settings(flags), screen)


def _sweep_settings(flags: Namespace) -> "SweepSettings":
    """Raises ConfigError."""
    from .sweep import SweepSettings

    settings = _settings(flags)
    if not settings.levels:
        raise ConfigError("--find-rate needs a service level: give for example --goodput ttft:500 tpot:50")
    if flags.concurrency is not None:
        raise ConfigError("--find-rate cannot be combined with --concurrency: leave --concurrency out")
    shares = flags.share or SHARES
    for share in shares:
        if not 0 < share <= 100:
            raise ConfigError(f"--share is a percentage above 0 and at most 100, got {share:g}")
    urls = _endpoints(flags.endpoint) if flags.endpoint else {settings.target.url.netloc: flags.url}
    targets = {name: _target(flags, url) for name, url in urls.items()}
    return SweepSettings(settings, targets, [share / 100 for share in shares], flags.within / 100)


def _endpoints(texts: list[str]) -> dict[str, str]:
    """["a=http://host:1"] -> {"a": "http://host:1"}. Raises ConfigError."""
    urls: dict[str, str] = {}
    for text in texts:
        name, _, url = text.partition("=")
        if not (name and url) or name in urls:
            raise ConfigError(
                f"--endpoint must be NAME=URL, each name once, for example mixed=http://127.0.0.1:8000; got {text!r}"
            )
        urls[name] = url
    return urls


def _settings(flags: Namespace) -> "BenchSettings":
    """Raises ConfigError."""
    from .settings import Arrival, BenchSettings, parse_level_words
    from .stats import parse_levels

    for name in ("rate", "burstiness", "timeout", "length_scale"):
        if (value := getattr(flags, name)) is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    for name in ("burstiness", "timeout", "length_scale", "time_scale", "think_time", "max_seconds"):
        if not math.isfinite(value := getattr(flags, name)):
            raise ConfigError(f"--{name.replace('_', '-')} must be a finite number, got {value:g}")
    arrival = Arrival(flags.rate, flags.burstiness, flags.concurrency, flags.think_time, flags.max_seconds)
    words = parse_level_words(flags.goodput or [], flags.more_levels or [])
    hidden = ("api_key", "more_levels")
    return BenchSettings(
        target=_target(flags, flags.url),
        work=_work(flags),
        arrival=arrival,
        levels=parse_levels(words),
        num_warmup=flags.warmup,
        json_file=flags.json_file,
        plot_file=flags.plot,
        shown={k: _shown(v) for k, v in vars(flags).items() if v is not None and k not in hidden} | {"goodput": words},
    )


def _target(flags: Namespace, address: str) -> "Target":
    from .settings import Target, choose_api, parse_url

    url = parse_url(address)
    wanted = flags.api.value if flags.api else None
    more: dict[str, Any] = {"temperature": flags.temperature}
    if flags.ignore_eos:
        more["ignore_eos"] = True
    return Target(
        url=url,
        api=choose_api(wanted, url, flags.workload.value, has_tokenizer=flags.tokenizer is not None),
        model=flags.model,
        api_key=(flags.api_key or "").strip() or None,  # that of a file ends with a line's end
        tokenizer=flags.tokenizer,
        vocab_size=flags.vocab_size,
        timeout_s=flags.timeout,
        more=more | _json_object(flags.extra_body),
    )


def _work(flags: Namespace) -> "Work":
    from .settings import Work
    from .traces import TraceLimits
    from .workloads import Lengths

    return Work(
        name=flags.workload.value,
        file=flags.file,
        limits=TraceLimits(
            num=flags.num_requests,
            time_scale=flags.time_scale,
            length_scale=flags.length_scale,
            max_input=flags.max_input_tokens,
            max_output=flags.max_output_tokens,
        ),
        inputs=Lengths.parse(flags.input_tokens, "--input-tokens"),
        outputs=Lengths.parse(flags.output_tokens, "--output-tokens"),
        turns=Lengths.parse(flags.turns, "--turns"),
        prefix_tokens=flags.prefix_tokens,
        num_prefixes=flags.num_prefixes,
        seed=flags.seed,
    )


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as e:
        raise ConfigError(f"--extra-body is not JSON: {e}. Write for example --extra-body '{{\"top_p\": 0.9}}'") from e
    if not isinstance(value, dict):
        raise ConfigError("--extra-body must be a JSON object, for example '{\"top_p\": 0.9}'")
    return value


def _shown(value: object) -> object:
    """Value that JSON can hold."""
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
