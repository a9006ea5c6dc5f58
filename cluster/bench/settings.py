"""Settings of `diptych bench`, checked as far as possible without the server."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from ...workers.common.errors import ConfigError
from ..traces.records import FORMATS
from .traces import TraceLimits
from .workloads import Lengths

WORKLOADS = ("random", "shared-prefix", "multi-turn", "sharegpt", *FORMATS)
CONVERSATIONS = ("multi-turn", "sharegpt")
FROM_FILES = ("sharegpt", *FORMATS)
APIS = ("completions", "chat")
_SCHEMES = ("http", "https", "grpc", "grpcs")


@dataclass(frozen=True, slots=True)
class Target:
    """Server to measure. `api`: one of APIS; `tokenizer`: folder of a checkpoint; `more`: more fields of requests."""

    url: SplitResult
    api: str
    model: str | None
    api_key: str | None
    tokenizer: str | None
    vocab_size: int
    timeout_s: float
    more: Mapping[str, Any]

    @property
    def is_grpc(self) -> bool:
        return self.url.scheme.startswith("grpc")


@dataclass(frozen=True, slots=True)
class Work:
    """Workload to send. `file`: of workloads that are read from a file."""

    name: str
    file: Path | None
    limits: TraceLimits
    inputs: Lengths
    outputs: Lengths
    turns: Lengths
    prefix_tokens: int
    num_prefixes: int
    seed: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """Times at which to send. `rate`: sessions per second; None: times of the trace, or a closed loop. `concurrency`:
    None is the default. `think_s`: between an answer and the next turn; `max_s`: last start of a session, 0: none."""

    rate: float | None
    burstiness: float
    concurrency: int | None
    think_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Settings of one measurement. `levels`: seconds, by metric; `shown`: the flags, for the JSON."""

    target: Target
    work: Work
    arrival: Arrival
    levels: Mapping[str, float]
    num_warmup: int
    json_file: Path | None
    plot_file: Path | None
    shown: Mapping[str, Any] = field(default_factory=dict[str, Any])


def parse_url(text: str) -> SplitResult:
    """Raises ConfigError."""
    try:
        url = urlsplit(text)
        is_one = url.scheme in _SCHEMES and bool(url.hostname) and (url.port is None or url.port > 0)
        (url.hostname or "").encode("idna")
    except ValueError:  # for a malformed port, address or name
        url, is_one = None, False
    if url is None or not is_one:
        raise ConfigError(
            f"{text!r} is not an endpoint: write --url http://HOST:PORT, or grpc://HOST:PORT for Diptych's gRPC"
        )
    if url.scheme.startswith("grpc") and url.port is None:
        raise ConfigError(f"{text!r} has no port: write for example grpc://HOST:50051")
    return url


def choose_api(api: str | None, url: SplitResult, workload: str, *, has_tokenizer: bool) -> str:
    """`api`, or the one for the workload: prompts are token ids unless there is a tokenizer. Raises ConfigError."""
    is_grpc, is_conversation = url.scheme.startswith("grpc"), workload in CONVERSATIONS
    if api is None:
        api = "chat" if is_conversation and (has_tokenizer or not is_grpc) else "completions"
    # Over gRPC an answer has token ids too, to which those of the next turn are added.
    if not has_tokenizer and (api == "chat" or (is_conversation and not is_grpc)):
        what = "conversations over HTTP are" if is_conversation and not is_grpc else "--api chat is"
        raise ConfigError(f"{what} sent as text: give --tokenizer, the folder of the model's checkpoint")
    return api


def parse_level_words(named: Sequence[str], trailing: Sequence[str]) -> list[str]:
    """Levels of --goodput, which may be repeated, hold several levels, or be followed by more: `ttft:500 tpot:50`.
    `trailing`: arguments without a flag. Raises ConfigError."""
    words = [word for text in named for word in text.replace(",", " ").split()]
    for word in trailing:
        if not named or ":" not in word:
            raise ConfigError(f"unexpected argument {word!r}: the endpoint is --url, a trace is --file")
    return [*words, *trailing]


def check_output_files(other: Path | None, plot: Path | None, pictures: Sequence[str] = (".svg",)) -> None:
    """Raise ConfigError for a file that cannot be written. `pictures`: endings of the formats that `plot` may have."""
    for file in (other, plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(
                f"{file.absolute().parent} is not a folder: create it, or choose another folder for {file.name}"
            )
        if file is not None and file.is_dir():
            raise ConfigError(f"cannot write {file}: it is a folder. Choose a file in it")
        if file is not None and not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            raise ConfigError(f"cannot write {file}: you have no right to. Choose another file")
    if plot is not None and plot.suffix.lower() not in pictures:
        kinds = ", ".join(ending[1:].upper() for ending in pictures)
        raise ConfigError(f"--plot writes {kinds} files only: use --plot {plot.with_suffix(pictures[0])}")
    if plot is not None and find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'diptych[plot]'")
