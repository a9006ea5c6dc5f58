"""Rule for the fields of OpenAI's request bodies.

    known and served        read by name in front/openai/types.py and front/openai/messages.py
    known and not served    refused by name, unless the value has no effect (NOT_SERVED lists such values)
    without effect here     accepted, whatever the value (NO_EFFECT)
    unknown                 served; named in the answer's header x-diptych-ignored and once in the log.
                            With `strict`: refused, with the field that was probably meant

The known fields are those of OpenAI's, vLLM's and SGLang's APIs. Names of fields come from clients: they are escaped,
cut and counted before they are used.
"""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from urllib.parse import quote

from ....workers.common.errors import InvalidRequest

HEADER = "x-diptych-ignored"
MAX_NAMES = 16  # most unknown fields of one call that the answer names
MAX_NAME_CHARS = 64
MAX_LOGGED = 256  # names that one router logs

Values = tuple[object, ...]

log = logging.getLogger("diptych.fields")

_OFF: Values = (False,)
_ON: Values = (True,)
_EMPTY: Values = ("", [], {})
_NONE: Values = ()

# Fields of either body that are known and not served, with the values without effect. null has no effect in
# any field.
NOT_SERVED: Mapping[str, Values] = {
    # OpenAI's
    "audio": _NONE,
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": _EMPTY,
    "modalities": (["text"],),
    "moderation": _NONE,
    "prediction": _NONE,
    "reasoning_effort": _NONE,
    "store": _OFF,
    "suffix": _EMPTY,
    "tool_choice": ("none", "auto"),
    "tools": _EMPTY,
    "verbosity": ("medium",),
    "web_search_options": _NONE,
    # vLLM's
    "add_generation_prompt": _ON,
    "allowed_token_ids": _NONE,
    "chat_template": _NONE,
    "continue_final_message": _OFF,
    "documents": _EMPTY,
    "early_stopping": _OFF,
    "ec_transfer_params": _EMPTY,
    "include_reasoning": _ON,
    "parallel_tool_calls": (True, False),
    "separate_reasoning": (True, False),
    "include_stop_str_in_output": _OFF,
    "kv_transfer_params": _EMPTY,
    "length_penalty": (1,),
    "logits_processors": _EMPTY,
    "logprob_token_ids": _NONE,
    "media_io_kwargs": _EMPTY,
    "mm_payload": _NONE,
    "mm_processor_kwargs": _EMPTY,
    "priority": (0,),
    "prompt_embeds": _EMPTY,
    "prompt_token_ids": _EMPTY,
    "repetition_detection": _NONE,
    "request_id": _NONE,
    "return_mm_kwargs": _ON,
    "return_prompt_text": _OFF,
    "return_token_offsets": _OFF,
    "return_weight_versions": _OFF,
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": _ON,
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": _NONE,
    "use_beam_search": _OFF,
    "vllm_xargs": _EMPTY,
    "watermarking": _OFF,
    # Qwen's
    "thinking_budget": _NONE,
    # SGLang's
    "bootstrap_host": _NONE,
    "bootstrap_port": _NONE,
    "bootstrap_room": _NONE,
    "custom_logit_processor": _NONE,
    "custom_params": ({},),
    "data_parallel_rank": _NONE,
    "disagg_prefill_dp_rank": _NONE,
    "extra_key": _NONE,
    "images_config": _EMPTY,
    "input_ids": _NONE,
    "lora_path": _NONE,
    "max_dynamic_patch": _NONE,
    "min_dynamic_patch": _NONE,
    "ngram_corpus_id": _NONE,
    "no_stop_trim": _OFF,
    "return_cached_tokens_details": _OFF,
    "return_hidden_states": _OFF,
    "return_meta_info": _OFF,
    "return_prompt_token_ids": _OFF,
    "return_routed_experts": _OFF,
    "rid": _NONE,
    "routed_dp_rank": _NONE,
    "routed_experts_start_len": (0,),
    "session_params": _EMPTY,
    "stop_regex": _EMPTY,
    "task": _NONE,
    "use_audio_in_video": _OFF,
}
# Labels, hints, and switches of features that this server does not have.
NO_EFFECT = frozenset(
    {
        "custom_labels",
        "guided_decoding_backend",  # there is one
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "session_id",
        "spaces_between_special_tokens",  # special tokens are not shown
        "stream_reasoning",  # it always is
        "user",
    }
)


@dataclass(frozen=True, slots=True)
class Known:
    """Fields that one kind of object may have."""

    served: Collection[str]
    not_served: Mapping[str, Values]
    no_effect: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class UnknownField:
    name: str  # "messages[].color", or "messages[].role=robot" for an unknown value
    param: str  # "messages[3].color", "messages[3].role"
    own: str  # "color", "robot"
    served: tuple[str, ...]  # known names or values in its place

    @property
    def meant(self) -> str | None:
        """Member of `served` that was probably meant."""
        return next(iter(get_close_matches(self.own, self.served, n=1, cutoff=0.6)), None)


class FieldCheck:
    """Check of the fields of one call that are not read by name. Collects the unknown ones."""

    def __init__(self) -> None:
        self._unknown: dict[str, UnknownField] = {}

    @property
    def unknown(self) -> tuple[UnknownField, ...]:
        return tuple(self._unknown.values())

    def check(self, given: Mapping[str, object], known: Known, where: str = "") -> None:
        """Raise InvalidRequest for a field that is known and not served. `where`: place of the object in the body,
        with a dot at its end: "messages[3]."."""
        for name, value in given.items():
            if name in known.no_effect:
                continue
            if name not in known.not_served:
                self._add(where, name, None, known.served)
            elif value is not None and value not in known.not_served[name]:
                raise InvalidRequest(f"{where}{name} is not supported: leave it out", param=f"{where}{name}")

    def add_word(self, word: str, words: Collection[str], param: str) -> None:
        """Note that the value of the field `param` is none of the known `words`."""
        where, dot, name = param.rpartition(".")
        self._add(where + dot, name, word, words)

    def _add(self, where: str, name: str, word: str | None, served: Collection[str]) -> None:
        if len(self._unknown) < MAX_NAMES:  # checked first: a body may have a million names
            name = shorten(name)
            own = name if word is None else shorten(word)
            general = re.sub(r"\[\d+\]", "[]", where) + (name if word is None else f"{name}={own}")
            self._unknown.setdefault(general, UnknownField(general, where + name, own, tuple(served)))


class UnknownFields:
    """Handling of unknown fields in one router: refuses them, or logs them once."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def note(self, fields: Sequence[UnknownField]) -> None:
        """Log new names. Raises InvalidRequest where unknown fields are refused."""
        if fields and self._strict:
            field = fields[0]
            remedy = f"did you mean {field.meant}?" if field.meant else "leave it out"
            raise InvalidRequest(f"{field.name} is unknown: {remedy}", param=field.param)
        for field in fields:
            if field.name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(field.name)
                hint = f"; did the client mean {field.meant}?" if field.meant else ""
                log.warning("a client sent %s, which is unknown%s", field.name, hint)


def header_value(fields: Iterable[UnknownField]) -> str:
    return ", ".join(field.name for field in fields)


def name_some(names: Sequence[str]) -> str:
    """Join at most MAX_NAMES of a client's names for an error message."""
    shown = ", ".join(map(shorten, names[:MAX_NAMES]))
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"


def shorten(name: str) -> str:
    """Client's name in printable ASCII without spaces and commas, cut to MAX_NAME_CHARS; never empty."""
    return quote(name[:MAX_NAME_CHARS], safe="[]", errors="replace")[:MAX_NAME_CHARS] or "%"
