"""Client's request: Request and SamplingParams. Frozen; knows neither torch nor the wire."""

import enum
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Protocol

from .errors import InvalidGrammar, InvalidRequest, PromptTooLong
from .logit_bias import LogitBias

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_PREDICTION_TOKENS = 1 << 16
MAX_CACHE_SALT_BYTES = 256
MAX_TENANT_BYTES = 64  # longest name of an API key
TTFT_BOUNDS_S = 0.001, 3600.0  # that a service level may promise
TPOT_BOUNDS_S = 0.0001, 60.0
NO_BIAS = LogitBias({})
RECORD_BYTES = 16  # of each part of a record's key
MAX_RECALLED = 1024  # records that a worker is asked for in one message
MAX_RECALLED_TOKENS = 1 << 20  # in the answer: at most 5 MiB
MAX_GRAMMAR_BYTES = 256 << 10  # of its text


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class GrammarKind(enum.Enum):
    JSON_SCHEMA = "json_schema"  # JSON Schema, as JSON
    REGEX = "regex"  # of the whole answer
    CHOICE = "choice"  # JSON array of strings: one of them is the answer
    GRAMMAR = "grammar"  # Lark, or GBNF
    STRUCTURAL_TAG = "structural_tag"  # JSON object: text, with parts that follow schemas


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar that an answer must follow, as its request gives it; workers/grammar/compiler.py compiles it."""

    kind: GrammarKind
    text: str
    field: str = field(default="grammar", compare=False)  # of the request that it came from, for errors

    def validate(self) -> None:
        """Raise InvalidGrammar for a text that is empty or too long to be compiled."""
        if not self.text:
            raise InvalidGrammar(f"the {self.kind.value} is empty: send one, or leave it out", param=self.field)
        # A character has at least one byte: long texts are not encoded.
        if len(self.text) > MAX_GRAMMAR_BYTES or len(self.text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            raise InvalidGrammar(f"the {self.kind.value} has more than {MAX_GRAMMAR_BYTES} bytes", param=self.field)


@dataclass(frozen=True, slots=True)
class ThoughtBudget:
    """Most tokens of a model's thought: after so many, the mark that ends it follows. Each mark is one token."""

    num_tokens: int  # between the marks
    begin_id: int
    end_id: int
    is_open: bool = False  # the prompt has begun the thought

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest."""
        _within("thinking_token_budget", self.num_tokens, 0, 1 << 30)
        check_token_ids((self.begin_id, self.end_id), vocab_size, "thinking_token_budget")


ANY_JSON_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters that choose each token. The order is vLLM's: bias, grammar, penalties, temperature, min-p, top-k,
    top-p."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output (CTRL, Keskar et al. 2019)
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] = field(default_factory=lambda: NO_BIAS)  # kept as a LogitBias
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the sampled token's and the k most likely
    prompt_logprobs: int | None = None  # the same for each token of the prompt except the first
    grammar: Grammar | None = None  # that the answer follows
    thought: ThoughtBudget | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.logit_bias, LogitBias):
            object.__setattr__(self, "logit_bias", LogitBias(self.logit_bias))

    def of_completion(self, seed: int, max_tokens: int) -> "SamplingParams":
        """Return these parameters with another seed and limit. dataclasses.replace takes twice as long."""
        values: list[Any] = list(_values_of(self))
        values[_SEED], values[_MAX_TOKENS] = seed, max_tokens
        return SamplingParams(*values)

    @property
    def bias(self) -> LogitBias:
        assert isinstance(self.logit_bias, LogitBias)
        return self.logit_bias

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_masked(self) -> bool:
        """True where the tokens so far decide which tokens may follow."""
        return self.grammar is not None or self.thought is not None

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest, naming the field, for any value outside its range. NaN is outside every range."""
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_k", self.top_k, 0, 1 << 30)
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("seed", self.seed, 0, (1 << 64) - 1)
        _within("max_tokens", self.max_tokens, 1, 1 << 30)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name, num in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if num is not None:
                _within(name, num, 0, MAX_LOGPROBS)
        check_counts(len(self.logit_bias), len(self.stop_token_ids))
        if self.grammar is not None:
            self.grammar.validate()
        if self.thought is not None:
            self.thought.validate(vocab_size)
        for bias in self.logit_bias.values():
            if not -100.0 <= bias <= 100.0:
                _within("logit_bias", bias, -100.0, 100.0)
        check_token_ids(self.logit_bias, vocab_size, "logit_bias")
        check_token_ids(self.stop_token_ids, vocab_size, "stop_token_ids")


_NAMES = [each.name for each in fields(SamplingParams)]
_SEED, _MAX_TOKENS = _NAMES.index("seed"), _NAMES.index("max_tokens")
_values_of = attrgetter(*_NAMES)


@dataclass(frozen=True, slots=True)
class RequestLevel:
    """Service level of a request. None: the cluster's. Workers learn the two times alone."""

    ttft_s: float | None = None  # time to first token
    tpot_s: float | None = None  # time per output token
    refuse: bool = False  # refused where it is predicted to be late; else it waits
    model: str = ""  # name and tier that the level comes from
    tier: str = "default"

    def validate(self) -> None:
        """Raise InvalidRequest for a time that no level may have. NaN is none."""
        for name, value, bounds in (("ttft_s", self.ttft_s, TTFT_BOUNDS_S), ("tpot_s", self.tpot_s, TPOT_BOUNDS_S)):
            if value is not None:
                _within(name, value, *bounds)


USUAL_LEVEL = RequestLevel()


class RequestTrace(Protocol):
    """Trace that a request belongs to, in the words of W3C's headers: workers get no more of it."""

    @property
    def traceparent(self) -> str: ...

    @property
    def tracestate(self) -> str: ...


@dataclass(frozen=True, slots=True)
class RecordKey:
    """Name under which workers record the tokens of an answer, so that any router can go on with it; `call`: digest of
    what was asked for, by which the same name for another call is noticed."""

    name: bytes
    call: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """Completion of a prompt, as asked for. The server makes `request_id`; `timeout_s` counts from receipt."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_s: float
    cache_salt: bytes = b""  # prefix-cache namespace: other salts never share blocks
    group: str = ""  # requests of one prompt that arrived together go to the same workers; "": no group
    num_alone: int = 0  # tokens that it generates in separate steps, because earlier steps with it failed
    first_prompt_logprob: int = 1  # position in the prompt, of the first that is wanted where any are
    is_prefix: bool = False  # of another prompt: only its KV is computed, for a hand-off, and no token
    embeds: bool = False  # the embedding of its prompt is computed, and no token
    level: RequestLevel = USUAL_LEVEL
    tenant: bytes = b""  # served in turn with others; empty: its salt is
    speculates: bool = True  # drafts may be verified for it, where its worker speculates
    prediction: tuple[int, ...] = ()  # token ids that the client expects the answer to be like: drafts come from them
    sparse_attention: bool | None = None  # long contexts may be decoded in part; None: as its worker is set
    trace: RequestTrace | None = field(default=None, compare=False)  # None: it is not traced
    record: RecordKey | None = None  # None: its tokens are not recorded
    received_at: float | None = field(default=None, compare=False)  # None: when its engine takes it

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Return whether log-probabilities of the prompt are asked for and not known yet."""
        return self.sampling.prompt_logprobs is not None and self.first_prompt_logprob < len(self.prompt_token_ids)

    @property
    def samples_nothing(self) -> bool:
        return self.is_prefix or self.embeds

    @property
    def max_new_tokens(self) -> int:
        """The most tokens that it may get."""
        return 0 if self.embeds else self.sampling.max_tokens

    @property
    def size(self) -> int:
        """Count of the numbers in it, which is what it costs to send."""
        return len(self.prompt_token_ids) + len(self.sampling.logit_bias) + len(self.prediction)

    def validate(self, vocab_size: int, max_context_tokens: int, output_token_ids: Sequence[int] = ()) -> None:
        """Raise InvalidRequest or PromptTooLong for what the model cannot compute. `output_token_ids`: made before."""
        num_prompt = len(self.prompt_token_ids)
        if num_prompt == 0:
            raise InvalidRequest("the prompt is empty: it must hold at least one token", param="prompt")
        check_prompt_length(num_prompt, max_context_tokens, embeds=self.embeds)
        if num_prompt + self.max_new_tokens > max_context_tokens:
            raise context_exceeded(
                max_context_tokens,
                f"you requested {num_prompt + self.max_new_tokens} tokens ({num_prompt} in the prompt, "
                f"{self.sampling.max_tokens} in the completion)",
                f"Please reduce the length of the prompt, or ask for at most {max_context_tokens - num_prompt}",
                param="max_tokens",
            )
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise InvalidRequest(f"timeout_s must be positive and finite, got {self.timeout_s}", param="timeout_s")
        check_cache_salt(self.cache_salt)
        if len(self.tenant) > MAX_TENANT_BYTES:
            raise InvalidRequest(f"the tenant has {len(self.tenant)} bytes; at most {MAX_TENANT_BYTES}")
        check_token_ids(self.prompt_token_ids, vocab_size, "prompt")
        self.sampling.validate(vocab_size)
        self.level.validate()
        check_token_ids(output_token_ids, vocab_size, "output_token_ids")
        check_prediction_length(len(self.prediction))
        check_token_ids(self.prediction, vocab_size, "prediction")
        if not 1 <= self.first_prompt_logprob <= num_prompt:
            raise InvalidRequest(
                f"first_prompt_logprob must be in [1, {num_prompt}], got {self.first_prompt_logprob}",
                param="prompt_logprobs",
            )
        if self.embeds and (self.is_prefix or self.sampling.prompt_logprobs is not None or output_token_ids):
            raise InvalidRequest("an embedding is asked for without tokens, log-probabilities and a hand-off")
        if len(output_token_ids) >= self.sampling.max_tokens:
            raise InvalidRequest("output_token_ids already hold max_tokens tokens: nothing is left to compute")


def check_prompt_length(num_tokens: int, max_context_tokens: int, *, embeds: bool = False) -> None:
    """Raise PromptTooLong for a prompt that leaves no room for a token. embeds: it gets none, and needs none."""
    if embeds and num_tokens > max_context_tokens:
        cause = f"the input has {num_tokens} tokens"
        raise context_exceeded(max_context_tokens, cause, "Please reduce the length of the input")
    if num_tokens >= max_context_tokens + embeds:
        raise context_exceeded(
            max_context_tokens,
            f"the prompt has {num_tokens} tokens, and at least one token must be left for the answer",
            "Please reduce the length of the prompt",
        )


def context_exceeded(max_context_tokens: int, cause: str, remedy: str, *, param: str = "prompt") -> PromptTooLong:
    """Make the error in OpenAI's words: clients such as litellm know it by its first sentence."""
    return PromptTooLong(
        f"This model's maximum context length is {max_context_tokens} tokens. However, {cause}. {remedy}.", param=param
    )


def check_counts(num_logit_bias: int, num_stop_token_ids: int) -> None:
    """Raise InvalidRequest for too many of them."""
    if num_logit_bias > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {num_logit_bias} entries; at most {MAX_LOGIT_BIAS}", param="logit_bias")
    if num_stop_token_ids > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids has more than {MAX_STOP_TOKEN_IDS} entries", param="stop_token_ids")


def check_prediction_length(num_tokens: int) -> None:
    """Raise InvalidRequest for a prediction that is too long."""
    if num_tokens > MAX_PREDICTION_TOKENS:
        raise InvalidRequest(
            f"the prediction has {num_tokens} tokens; at most {MAX_PREDICTION_TOKENS}", param="prediction"
        )


def check_cache_salt(salt: bytes) -> None:
    """Raise InvalidRequest for a salt that is too long."""
    if len(salt) > MAX_CACHE_SALT_BYTES:
        raise InvalidRequest(f"cache_salt has {len(salt)} bytes; at most {MAX_CACHE_SALT_BYTES}", param="cache_salt")


def check_token_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest where an id is outside [0, vocab_size)."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequest(
            f"{param}: token id {bad} is out of vocabulary, which has {vocab_size} tokens", param=param
        )


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not (low <= value <= high) or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name} must be in {bracket}{low}, {high}], got {value}", param=name)
