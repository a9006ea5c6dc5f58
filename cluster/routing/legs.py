"""What a request's record says and hears: its legs on workers, the tokens they make, and the actions it asks for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ...workers.common.request import FinishReason
from ...workers.common.timings import SequenceTimings
from .generation import TokenLogprob


class Part(Enum):
    ALONE = "alone"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Leg:
    handle: int
    worker: str  # incarnation
    part: Part
    has_spoken: bool = False
    offers: list[str] = field(default_factory=list[str])  # hand-off ids under which it was to migrate


class LegToken(NamedTuple):
    position: int  # in the request's output, from 0
    token_id: int
    finish: FinishReason | None = None
    logprob: TokenLogprob | None = None
    num_cached: int | None = None
    timings: SequenceTimings | None = None  # with its leg's first


@dataclass(frozen=True, slots=True)
class Choose:
    """A route is needed: answer with `begin`, or `fail` when there is none."""


@dataclass(frozen=True, slots=True)
class ChooseSink:
    """A decode worker is needed for an offer that stands at `source`: answer with `begin_sink`."""

    source: str


@dataclass(frozen=True, slots=True)
class PrefixPull:
    """The KV of the leading tokens is offered by `worker`."""

    worker: str
    handoff_id: str


@dataclass(frozen=True, slots=True)
class Submit:
    """`handoff_id`: where the leg is a source or a sink; `source`: the worker that a sink pulls from."""

    leg: Leg
    output_token_ids: tuple[int, ...]
    handoff_id: str | None = None
    source: str | None = None
    prefix: PrefixPull | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """Hand off the running leg."""

    leg: Leg
    handoff_id: str


@dataclass(frozen=True, slots=True)
class OfferPrefix:
    """Have `worker` offer its KV of the request's first `num_tokens` tokens, of its prompt and its output so far."""

    worker: str
    handoff_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Spoke:
    """The leg's first token is here. A PREFILL leg computes nothing from here on."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Abort:
    leg: Leg


@dataclass(frozen=True, slots=True)
class Forget:
    leg: Leg


Action = Choose | ChooseSink | Submit | Offer | OfferPrefix | Spoke | Abort | Forget
Actions = Sequence[Action]
