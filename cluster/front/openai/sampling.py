"""Fields of a request body that choose each token: OpenAI's, and those of vLLM and SGLang beside them."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ....workers.common.errors import InvalidRequest
from ....workers.common.request import MAX_LOGIT_BIAS, NO_BIAS, Grammar, SamplingParams
from .fields import FieldCheck, name_some
from .messages import Many
from .structured import (
    ALLOWED,
    BAD_WORDS,
    GUIDED_NAMES,
    NAMES,
    SGLANG_NAMES,
    StructuredOutputs,
    allowed_tokens,
    check_structured,
    text_without,
    the_only,
)

EXPECTED_BIAS = "an object of token ids (as strings) and numbers"
_STRUCTURED = frozenset(
    {
        "response_format",
        "text",
        "structured_outputs",
        ALLOWED,
        BAD_WORDS,
        *GUIDED_NAMES.values(),
        *SGLANG_NAMES.values(),
    }
)
_SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
)

Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]


def check_salt(given: str | None) -> None:
    """Raise InvalidRequest for a salt that would separate nobody."""
    if given == "":
        raise InvalidRequest("cache_salt must be a non-empty string: leave it out to share", param="cache_salt")


class SamplingBody(BaseModel):
    """Fields that all endpoints have. None: not given."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    model: str | None = None
    stop: str | Many[str] | None = None
    seed: Seed | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    service_tier: str | None = None
    # vLLM's
    top_k: int | None = None  # 0 or -1: off
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Many[int] | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: Many[int] | None = None
    bad_words: Many[str] | None = None  # none of them occurs in the answer
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None  # this and the next five: older names of the same
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    cache_salt: str | None = None  # requests with the same salt share cached prefixes
    # SGLang's names of grammars
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    # Diptych's
    timeout_s: float | None = None

    def check(self, fields: FieldCheck) -> None:
        """Raise InvalidRequest for fields that are not served, and for contradictions."""
        if self.structured_outputs is not None:
            check_structured(self.structured_outputs, fields)
        check_salt(self.cache_salt)

    @property
    def format_grammar(self) -> Grammar | None:
        """Grammar that the endpoint's own field gives. Raises InvalidRequest."""
        return None

    def _grammar(self) -> Grammar | None:
        """Return the grammar of the answer, if any. Raises InvalidRequest."""
        asked = [] if (own := self.format_grammar) is None else [own]
        if self.structured_outputs is not None:
            asked += self.structured_outputs.grammars(NAMES)
        guided = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
            json_object=self.guided_json_object,
            whitespace_pattern=self.guided_whitespace_pattern,
        )
        asked += guided.grammars(GUIDED_NAMES)
        sglang = StructuredOutputs(json=self.json_schema, regex=self.regex, grammar=self.ebnf)
        asked += sglang.grammars(SGLANG_NAMES)
        if self.allowed_token_ids is not None:
            asked.append(allowed_tokens(self.allowed_token_ids))
        if self.bad_words:
            asked.append(text_without(self.bad_words))
        return the_only(asked)

    def sampling(self, logprobs: int | None, prompt_logprobs: int | None = None) -> SamplingParams:
        given: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **given,
            top_k=0 if self.top_k in (None, -1) else self.top_k or 0,
            logit_bias=_logit_bias(self.logit_bias) if self.logit_bias else NO_BIAS,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=self._grammar() if self.__pydantic_fields_set__ & _STRUCTURED else None,
        )

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def _logit_bias(given: dict[str, Any]) -> dict[int, float]:
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {len(given)} entries; at most {MAX_LOGIT_BIAS}", param="logit_bias")
    wrong = [key for key, value in given.items() if not _is_bias(key, value)]
    if wrong:
        raise InvalidRequest(
            f"logit_bias must be {EXPECTED_BIAS}, but is not at {name_some(wrong)}", param="logit_bias"
        )
    if not all(-100 <= value <= 100 for value in given.values()):
        raise InvalidRequest("a logit_bias must be in [-100, 100]", param="logit_bias")
    return {int(key): float(value) for key, value in given.items()}


def _is_bias(key: str, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return key.isascii() and key.isdecimal() and len(key) <= 10 and is_number
