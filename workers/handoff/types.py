"""Events, actions and messages of hand-offs. Plain data; see source_machine.py and sink_machine.py."""

import enum
from dataclasses import dataclass

from ..common.errors import DeadlineExceeded, DiptychError, HandoffError, LeaseLost, RequestAborted, SequenceEnded
from ..kv.segment import Read, Segment


class SourceState(enum.Enum):
    OPEN = "open"
    SEALED = "sealed"
    RELEASED = "released"
    EXPIRED = "expired"
    ABORTED = "aborted"


class SinkState(enum.Enum):
    WAITING = "waiting"
    PULLING = "pulling"
    PULLED = "pulled"
    COMMITTED = "committed"
    FAILED = "failed"


def is_sequence_end(error: DiptychError) -> bool:
    """Return whether a source gave a hand-off up because its sequence ended there: it finished, was aborted or ran out
    of time. Nothing failed then, and nothing is lost."""
    return isinstance(error, SequenceEnded | RequestAborted | DeadlineExceeded)


def why_over(state: SourceState, error: DiptychError | None) -> HandoffError:
    """The error for a sink that comes after the hand-off ended in `state`, by `error` if there was one."""
    if error is not None and is_sequence_end(error):
        return SequenceEnded(f"the hand-off is over: {state.value}, {error.message}")
    return LeaseLost(f"the hand-off is over: {state.value}" + ("" if error is None else f", {error.message}"))


@dataclass(frozen=True, slots=True)
class Seal:
    num_segments: int
    num_computed: int  # tokens whose KV the segments hold
    output_token_ids: tuple[int, ...]
    num_draft_computed: int = 0  # of num_computed, those whose KV the draft layers hold, too
    num_inexact: int = 0  # of num_computed, the last ones, whose KV sparse attention computed
    multiple: int = 1  # of which num_computed is one: slots of the source's blocks, where it hands off only full ones

    def is_of(self, num_computed: int) -> bool:
        """Return whether a sequence with so many computed tokens at its source is sealed so."""
        return self.num_computed == num_computed - num_computed % self.multiple


@dataclass(frozen=True, slots=True)
class Aborted:
    error: str  # a name in errors.py
    message: str


# Events of the engine, for the source: each names its hand-off


@dataclass(frozen=True, slots=True)
class HandoffOpened:
    """A running sequence, or a cached prefix, is offered; the next events are about it."""

    handoff_id: str
    key: str | None  # of the sequence; None: a prefix
    num_tokens: int  # KV of at most this many tokens will be announced
    is_live: bool  # the sequence continues to run


@dataclass(frozen=True, slots=True)
class HandoffRefused:
    """The hand-off was never opened."""

    handoff_id: str
    error: DiptychError


@dataclass(frozen=True, slots=True)
class SegmentReady:
    """Blocks of an offered sequence hold the KV of these layers, and are leased until the hand-off ends."""

    handoff_id: str
    segment: Segment


@dataclass(frozen=True, slots=True)
class HandoffHeld:
    """A running sequence has made all tokens that were offered. It waits for its sink or the end of the hand-off."""

    handoff_id: str


@dataclass(frozen=True, slots=True)
class HandoffSealed:
    """Event: no segments follow; the sequence, or the prefix, continues at the sink after these tokens."""

    handoff_id: str
    key: str | None  # of the sequence; None: a cached prefix
    num_computed: int
    output_token_ids: tuple[int, ...]  # none of a prefix
    is_live: bool = False  # it was running
    num_draft_computed: int = 0  # see Seal
    num_inexact: int = 0  # see Seal
    num_cached: int = 0  # of a prompt's tokens, found in the prefix cache
    num_stored: int = 0  # of them, computed and added to it


@dataclass(frozen=True, slots=True)
class HandoffEnded:
    """The engine gives the hand-off up: the sequence finished, failed, was aborted, or is to be computed again."""

    handoff_id: str
    error: DiptychError


HandoffEvent = HandoffOpened | HandoffRefused | SegmentReady | HandoffHeld | HandoffSealed | HandoffEnded


# Actions of the source


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse the subscription."""

    error: DiptychError


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this on the sink's stream."""

    sink: str
    what: Segment | Seal | Aborted


@dataclass(frozen=True, slots=True)
class EndStream:
    sink: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a renewal or a release."""

    held: bool


@dataclass(frozen=True, slots=True)
class EndLease:
    """Free the leased blocks."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Stop and seal the sequence of a live hand-off: its sink has read nearly all, or gains on it no more."""


SourceAction = Refuse | Tell | EndStream | Answer | EndLease | CaughtUp


@dataclass(frozen=True, slots=True)
class Offer:
    """First message of the source: how much will come at most, in blocks of its own size."""

    num_tokens: int
    num_blocks: int
    block_size: int
    lease_s: float
    num_layers: int  # of the source
    num_target_layers: int  # of these, the first ones; the others are of a model that drafts
    wants_draft: bool = False  # those others are read, too
    is_live: bool = False  # the sequence runs at the source during the hand-off
    used_multiple: int = 1  # of tokens, that the sink can use: slots of its blocks, where it uses only full ones

    @property
    def num_used_blocks(self) -> int:
        """Number of leading blocks that the sink has use for."""
        return -(-(self.num_tokens - self.num_tokens % self.used_multiple) // self.block_size)


# Actions of the sink


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserve blocks for so many tokens; answer with `reserved`, or `failed`."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Renew the lease. `num_read`: the first so many segments are read. Answer with `renewed`, or not at all."""

    num_read: int


@dataclass(frozen=True, slots=True)
class Release:
    """Ask the source to release. Answer with `released`, or not at all."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin the sequence, provisionally: all is read and the release is asked for. Nothing of it may be sent
    or shared before `Commit`. `Fail` may follow instead."""

    seal: Seal


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks that the engine reserved for all tokens, of which the first `num_held_tokens` have their KV there
    already."""

    block_ids: tuple[int, ...]
    num_held_tokens: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Continue the sequence here: the blocks hold the KV of the sealed tokens, and the source held it throughout."""

    seal: Seal


@dataclass(frozen=True, slots=True)
class Fail:
    """Give the blocks back, or into quarantine: then stop the reads, and call `settled` when none can land."""

    error: DiptychError
    quarantine: bool


@dataclass(frozen=True, slots=True)
class Abandon:
    """Tell the source that the pull is given up, if it still listens."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Free the quarantined blocks."""


SinkAction = Reserve | Read | Renew | Release | Begin | Commit | Fail | Abandon | Settle
