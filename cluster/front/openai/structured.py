"""Fields of a request body that give its answer a grammar: OpenAI's `response_format`, vLLM's `structured_outputs`, the
older `guided_*`, and SGLang's names. A call has at most one of them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ....workers.common.errors import InvalidRequest
from ....workers.common.request import ANY_JSON_OBJECT, Grammar, GrammarKind
from ...dialects.lark import literal
from .fields import FieldCheck, Known, shorten
from .messages import Many

_MODEL = ConfigDict(extra="allow", strict=True, frozen=True)
BAD_WORDS = "bad_words"
MAX_BAD_WORDS = 128  # more are too much for the compiler
ALLOWED = "allowed_token_ids"
MAX_ALLOWED = 1 << 15
_ENDLESS = 1 << 30  # tokens: more than any answer has
_GUIDANCE = "x-guidance"  # member of a schema with options of the compiler


class JsonSchemaFormat(BaseModel):
    """OpenAI's `response_format.json_schema`."""

    model_config = _MODEL

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = _MODEL

    type: str
    json_schema: JsonSchemaFormat | None = None
    structures: Many[Any] | None = None  # of vLLM's structural tags, and the next
    triggers: Many[Any] | None = None

    def check(self, fields: FieldCheck) -> None:
        fields.check(self.model_extra or {}, _RESPONSE_FORMAT, "response_format.")
        if self.json_schema is not None:
            fields.check(self.json_schema.model_extra or {}, _JSON_SCHEMA, "response_format.json_schema.")

    def grammar(self) -> Grammar | None:
        """Raises InvalidRequest."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return ANY_JSON_OBJECT
            case "json_schema":
                if self.json_schema is None:
                    raise InvalidRequest(
                        "response_format.json_schema is missing: send the schema there",
                        param="response_format.json_schema",
                    )
                given = self.json_schema
                # OpenAI promises nothing without `strict`; here only what cannot be enforced is let go, and only where
                # the client says so.
                return _json(given.schema_, {"lenient": True} if given.strict is False else {})
            case "structural_tag":
                return _structural_tag({"structures": self.structures, "triggers": self.triggers})
            case _:
                raise InvalidRequest(
                    f"response_format.type {shorten(self.type)} is unknown: send text, json_object, json_schema or "
                    "structural_tag",
                    param="response_format.type",
                )


class StructuredOutputs(BaseModel):
    """vLLM's. A schema is an object, or a string that holds one."""

    model_config = _MODEL

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None  # Lark, or GBNF
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None  # of JSON, between its parts
    disable_any_whitespace: bool | None = None

    def grammars(self, names: Mapping[str, str]) -> list[Grammar]:
        """Grammar of each field that is given. names: of the fields, as the client knows them."""
        options: dict[str, Any] = {}
        if self.whitespace_pattern is not None:
            options["whitespace_pattern"] = self.whitespace_pattern
        if self.disable_any_whitespace:
            options["whitespace_flexible"] = False
        found: list[tuple[str, Grammar]] = []
        if self.json_ is not None:
            found.append(("json", _json(self.json_, options)))
        if self.json_object:
            found.append(("json_object", _json({"type": "object"}, options)))
        if self.regex is not None:
            found.append(("regex", Grammar(GrammarKind.REGEX, self.regex)))
        if self.choice is not None:
            found.append(("choice", Grammar(GrammarKind.CHOICE, json.dumps(self.choice))))
        if self.grammar is not None:
            found.append(("grammar", Grammar(GrammarKind.GRAMMAR, self.grammar)))
        if self.structural_tag is not None:
            found.append(("structural_tag", _structural_tag(self.structural_tag)))
        return [replace(grammar, field=names[name]) for name, grammar in found]


def check_structured(given: StructuredOutputs, fields: FieldCheck) -> None:
    """Raise InvalidRequest for fields that are not served."""
    fields.check(given.model_extra or {}, _STRUCTURED_OUTPUTS, "structured_outputs.")


def allowed_tokens(token_ids: Sequence[int]) -> Grammar:
    """Grammar of answers of these tokens alone: vLLM's `allowed_token_ids`. Such an answer is never complete, so that a
    token that ends it must be one of them. Raises InvalidRequest."""
    if len(token_ids) > MAX_ALLOWED or min(token_ids, default=0) < 0 or len(ids := sorted(set(token_ids))) < 2:
        # What follows by force without end is too much for the compiler.
        raise InvalidRequest(f"{ALLOWED} must be 2 to {MAX_ALLOWED} different ids of tokens", param=ALLOWED)
    return Grammar(GrammarKind.GRAMMAR, f"start: <[{','.join(map(str, ids))}]>{{{_ENDLESS}}}", ALLOWED)


def text_without(words: Sequence[str]) -> Grammar:
    """Grammar of texts in which none of these occurs: vLLM's `bad_words`. Raises InvalidRequest."""
    if len(words) > MAX_BAD_WORDS or not all(words):
        raise InvalidRequest(f"{BAD_WORDS} must be at most {MAX_BAD_WORDS} words, none of them empty", param=BAD_WORDS)
    bad = " | ".join(map(literal, words))
    text = f"start: TEXT\nTEXT: ANY & ~BAD\nBAD: ANY ({bad}) ANY\nANY: /(?s:.*)/"
    return Grammar(GrammarKind.GRAMMAR, text, BAD_WORDS)


def the_only(asked: list[Grammar]) -> Grammar | None:
    """Return the grammar of a call, if any. Raises InvalidRequest where there are several."""
    if len(asked) > 1:
        raise InvalidRequest(
            f"{asked[0].field} and {asked[1].field} both say what the answer looks like: leave one out",
            param=asked[1].field,
        )
    return asked[0] if asked else None


def _json(schema: dict[str, Any] | bool | str | None, options: Mapping[str, Any]) -> Grammar:
    if schema is None:
        schema = {"type": "object"}
    if options and isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            return Grammar(GrammarKind.JSON_SCHEMA, str(schema))  # refused where it is compiled
    if options and isinstance(schema, dict):
        own = schema.get(_GUIDANCE)
        schema = {**schema, _GUIDANCE: {**(own if isinstance(own, dict) else {}), **options}}
    return Grammar(GrammarKind.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema))


def _structural_tag(tag: Mapping[str, Any] | str) -> Grammar:
    return Grammar(GrammarKind.STRUCTURAL_TAG, tag if isinstance(tag, str) else json.dumps(tag))


_FIELDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
NAMES = {name: f"structured_outputs.{name}" for name in _FIELDS}
GUIDED_NAMES = {name: f"guided_{name}" for name in _FIELDS}
SGLANG_NAMES = {"json": "json_schema", "regex": "regex", "grammar": "ebnf"}
_RESPONSE_FORMAT = Known(tuple(ResponseFormat.model_fields), {"format": ()})
_JSON_SCHEMA = Known(("name", "description", "schema", "strict"), {})
_STRUCTURED_OUTPUTS = Known(
    (*_FIELDS, "whitespace_pattern", "disable_any_whitespace"),
    {"disable_additional_properties": (False,)},
    {"disable_fallback", "backend"},
)
