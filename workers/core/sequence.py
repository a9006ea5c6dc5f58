"""A Sequence is a request being computed on one worker; a Batch is the sequences of one step.

Life of a sequence:  WAITING -> RUNNING -> FINISHED
                        ^          |
                        └──────────┘ preempted: its blocks are freed, its tokens kept
    IMPORTING (a sink: its KV is on the way) -> RUNNING, at first provisionally
    RUNNING -> HANDED_OFF (a source: its blocks now belong to the hand-off)

One rule covers prefill, chunks, decode, preemption, resumption and hand-off alike: a sequence has `token_ids` (prompt
and output) of which the first `num_computed` have their KV in the cache. A step computes some of the rest; a token is
sampled exactly when none is left. Decode is the case where one is left.
"""

import enum
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..common.request import FinishReason, Request
from ..common.timings import SequenceClock
from ..grammar.matcher import Matcher

if TYPE_CHECKING:  # brings numpy, which clients of the cluster do without
    import numpy as np
    from numpy.typing import NDArray

    from ..common.prompt_logprobs import PromptLogprobs
    from .embedding import Pooling

NEVER = 1 << 60  # a position that no sequence reaches
KNOWN = -1  # in place of an entry of the previous batch: the input token is known


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    IMPORTING = "importing"
    RUNNING = "running"
    HANDED_OFF = "handed_off"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    key: str  # the worker's name for it; request ids repeat when a request is resumed
    request: Request
    token_ids: list[int]  # prompt and output
    num_prompt: int
    deadline: float  # on the worker's monotonic clock, seconds
    arrival: int  # admission order; smaller is older
    due: float = 0.0  # when its first token should be there, less what that takes; same clock
    gives_way_until: float = 0.0  # its prompt is late, and lets others go first until then; same clock
    end: int = NEVER  # the sequence ends when it has this many tokens
    min_end: int = 0  # ... and, once it has this many, with one of these:
    stop_ids: frozenset[int] = frozenset()
    # A step of it may be launched before its last token is known: Runner.takes_input_from_previous.
    input_from_previous: bool = False
    handoff_id: str | None = None  # the source side of a hand-off
    is_held: bool = False  # it has generated all tokens that it may before its peer answers, and waits
    provisional: "Provisional | None" = None  # a sink, until the release is answered
    num_alone: int = 0  # tokens that it still generates in separate steps: see suspects.py
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0  # tokens whose KV is in the cache
    sparse_from: int = NEVER  # computed tokens, from so many on it decodes with part of its context: see decoding.py
    num_exact: int = NEVER  # of those, at most, whose KV is as full attention computes it: see decoding.py
    num_draft_computed: int = 0  # leading tokens whose KV is in the draft layers, too: see draft_kv.py
    num_cached: int = 0  # of num_computed, found in the prefix cache (or at a sibling) at first admission
    num_pulled: int = 0  # of num_cached, pulled from another worker
    num_stored: int = 0  # of the prompt, in blocks that it computed and added to the prefix cache
    num_resumed: int = 0  # output tokens that another worker made before
    next_prompt_logprob: int = NEVER  # position in the prompt of the first token whose log-probability is due
    pooling: "Pooling | None" = None  # of the embedding that is asked for
    pooled: "NDArray[np.float64] | None" = None  # [H], sum of its pooled hidden states so far
    recomputes: bool = False  # all its tokens are computed, whatever is cached
    clock: SequenceClock | None = None  # until its first token here
    matcher: Matcher | None = None  # of the grammar that its output follows
    num_drafted: int = 0  # tokens that were drafted, and verified, since its last TokenNote
    num_accepted: int = 0  # of those, found to be its own
    run_length: int = 1  # number of tokens that its last step yielded: several where the grammar forced them
    block_table: list[int] = field(default_factory=list[int])
    block_hashes: list[bytes] = field(default_factory=list[bytes])  # of its full blocks, as far as known

    @property
    def sequence(self) -> "Sequence":
        """Return this one: it is the SampledRow of its next token."""
        return self

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def max_num_tokens(self) -> int:
        """The most tokens that it can have."""
        return self.num_prompt + self.request.sampling.max_tokens

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def max_cached(self) -> int:
        """The most tokens that may come from a cache: the logits or hidden states of those after them are needed."""
        return 0 if self.recomputes else min(len(self.token_ids), self.next_prompt_logprob) - 1

    @property
    def is_decoding(self) -> bool:
        """Return whether all is computed but what its last step yielded."""
        return self.is_decoding_from(self.num_computed)

    def is_decoding_from(self, num_computed: int) -> bool:
        """Return `is_decoding` as it is once so many tokens are computed."""
        return 0 < len(self.token_ids) - num_computed <= self.run_length and self.num_output > 0

    @property
    def draft_end(self) -> int:
        """Number of tokens that it has at most with those of a draft. Later rows would attend to all of a context of
        which a decode reads a part, and an answer would depend on what was drafted."""
        return min(self.end - 1, self.sparse_from)

    def ends_with(self, token_id: int, num_tokens: int) -> bool:
        """Return whether this token stops it where it is the last of so many."""
        return num_tokens >= self.min_end and token_id in self.stop_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why its last token ends it; None: it goes on."""
        num_tokens = len(self.token_ids)
        if self.ends_with(self.token_ids[-1], num_tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self.end else None

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    def take_drafted(self) -> tuple[int, int]:
        """Return `num_drafted` and `num_accepted`, which begin at 0 again."""
        counts = self.num_drafted, self.num_accepted
        self.num_drafted = self.num_accepted = 0
        return counts


IsHere = Callable[[Sequence], bool]  # False: it has left since its step was launched


def everybody(_sequence: Sequence) -> bool:
    """Return True: nobody has left."""
    return True


class SampledRow(Protocol):
    """Row of logits from which the next token is sampled: a sequence, or one that drafted tokens follow."""

    @property
    def sequence(self) -> Sequence: ...
    @property
    def request(self) -> Request: ...
    @property
    def matcher(self) -> Matcher | None: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_output(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def output_token_ids(self) -> list[int]: ...


@dataclass(frozen=True, slots=True, eq=False)
class DraftedRow:
    """A sequence as it is if drafted tokens follow. A SampledRow."""

    sequence: Sequence
    drafted: list[int]  # at least one

    @property
    def request(self) -> Request:
        return self.sequence.request

    @property
    def matcher(self) -> Matcher | None:
        return self.sequence.matcher

    @property
    def num_prompt(self) -> int:
        return self.sequence.num_prompt

    @property
    def num_tokens(self) -> int:
        return self.sequence.num_tokens + len(self.drafted)

    @property
    def num_output(self) -> int:
        return self.sequence.num_output + len(self.drafted)

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.token_ids + self.drafted

    @property
    def output_token_ids(self) -> list[int]:
        return self.sequence.output_token_ids + self.drafted


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`num_new` tokens of `sequence`, from `start` on; `samples` when they are the last it has."""

    sequence: Sequence
    num_new: int

    @property
    def start(self) -> int:
        """Position of the first of these tokens, once the step before is recorded."""
        return self.sequence.num_computed

    @property
    def samples(self) -> bool:
        return self.num_new == self.sequence.num_uncomputed


class UnsampledChunk(ScheduledSequence):
    """Chunk of a prompt after which no token is sampled (Request.samples_nothing)."""

    __slots__ = ()

    @property
    def samples(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class NextChunk(ScheduledSequence):
    """Tokens of a prompt, or the first one after it, scheduled while the step is under way that computes the tokens
    before `first`."""

    first: int

    @property
    def start(self) -> int:
        return self.first

    @property
    def samples(self) -> bool:
        sequence = self.sequence
        return self.first + self.num_new == len(sequence.token_ids) and not sequence.request.samples_nothing


@dataclass(frozen=True, slots=True)
class DraftEntry(ScheduledSequence):
    """The last token of a sequence, and its draft. `yielded`: tokens that the step yields, once it is computed."""

    draft: list[int]
    method: str  # by which it was drafted
    yielded: list[int] = field(default_factory=list[int])

    @property
    def samples(self) -> bool:
        return True

    @property
    def num_accepted(self) -> int:
        return len(self.yielded) - 1

    @property
    def token_ids(self) -> list[int]:
        return [self.sequence.token_ids[-1], *self.draft]

    def rows(self) -> list[SampledRow]:
        drafted = (DraftedRow(self.sequence, self.draft[:num]) for num in range(1, len(self.draft) + 1))
        return [self.sequence, *drafted]

    def settle(self, sampled: "SequenceOf[SampledToken]") -> "SequenceOf[SampledToken]":
        """Return what the step yields of the tokens that its rows gave: up to the first that is not as drafted, or ends
        the sequence."""
        sequence = self.sequence
        for token, drafted in zip(sampled, (*self.draft, None), strict=True):
            self.yielded.append(token.token_id)
            is_end = sequence.ends_with(token.token_id, sequence.num_tokens + len(self.yielded))
            if is_end or token.token_id != drafted:
                break
        return sampled[: len(self.yielded)]


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step. Every block table already covers the new tokens."""

    entries: SequenceOf[ScheduledSequence]
    num_decodes: int = 0  # number of entries that decode, one token each: they come first
    num_runs: int = 0  # number of entries after those that decode, too: what is left of several tokens, or a draft
    drafts: SequenceOf[DraftEntry] = ()  # of those entries
    copies: SequenceOf[tuple[int, int]] = ()  # (from, to) blocks, to be copied before anything is computed
    # Not empty: launched while the previous batch is under way, before which `num_computed` and `token_ids` are. The
    # input of entry i is the token that entry previous_entries[i] of the previous batch yields, and it is sampled;
    # KNOWN: its sequence is not in that batch, or the entry is a NextChunk of a prompt.
    previous_entries: SequenceOf[int] = ()
    # Of prompts, see next_prompt_logprob: what the runner computes it adds. None: nothing is due.
    prompt_logprobs: "list[tuple[Sequence, PromptLogprobs]] | None" = None
    # Of prompts whose embeddings are due: sums [H] of the hidden states of this step that are pooled. As above.
    pooled: "list[tuple[Sequence, NDArray[np.float64]]] | None" = None

    @classmethod
    def of(
        cls,
        entries: SequenceOf[ScheduledSequence],
        num_decodes: int,
        copies: SequenceOf[tuple[int, int]] = (),
        num_runs: int = 0,
        previous_entries: SequenceOf[int] = (),
    ) -> "Batch":
        """O(entries that do not decode)."""
        drafts = [e for e in entries[num_decodes : num_decodes + num_runs] if isinstance(e, DraftEntry)]
        if num_decodes + num_runs == len(entries):
            return cls(entries, num_decodes, num_runs, drafts, copies, previous_entries)
        prompts = [e.sequence for e in entries[num_decodes + num_runs :]]
        scores, embeds = any(s.next_prompt_logprob < s.num_prompt for s in prompts), any(s.pooling for s in prompts)
        return cls(
            entries,
            num_decodes,
            num_runs,
            drafts,
            copies,
            previous_entries,
            prompt_logprobs=[] if scores else None,
            pooled=[] if embeds else None,
        )

    @property
    def sampled(self) -> list[int]:
        """Entries after which a token is sampled, by index. O(entries)."""
        if not self.previous_entries:
            return [i for i, entry in enumerate(self.entries) if entry.samples]
        pairs = enumerate(zip(self.entries, self.previous_entries, strict=True))
        return [i for i, (entry, previous) in pairs if previous != KNOWN or entry.samples]

    @property
    def num_decode_tokens(self) -> int:
        """Number of tokens of the entries that decode, with drafts. O(runs)."""
        runs = self.entries[self.num_decodes : self.num_decodes + self.num_runs]
        return self.num_decodes + sum(e.num_new for e in runs)

    @property
    def num_prefill_tokens(self) -> int:
        """O(entries that do not decode)."""
        return sum(e.num_new for e in self.entries[self.num_decodes + self.num_runs :])

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.num_prefill_tokens

    def __bool__(self) -> bool:
        return bool(self.entries)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token that a batch entry yielded, with log-probabilities (nats) where the request asked for them."""

    sequence: Sequence
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Provisional:
    """State of a sequence whose KV was read and may still prove invalid: the token that it generates meanwhile. The
    sequence itself does not know it."""

    token: SampledToken | None = None
    sampled_at: float = 0.0

    def keep(self, token: SampledToken, now: float) -> None:
        """Keep the token; the sequence waits from now on."""
        self.token, self.sampled_at = token, now
        token.sequence.is_held = True
