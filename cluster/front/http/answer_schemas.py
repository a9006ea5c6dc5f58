"""JSON Schemas of the answers, by name. Tests compare them with what the server sends, in both directions."""

from collections.abc import Mapping

Schema = Mapping[str, object]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def _const(value: str | bool) -> Schema:
    return {"const": value}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


_FORECAST = _or_null(_object({"ttft_s": NUMBER, "queue_s": NUMBER, "tpot_s": NUMBER}))
_IDS = _or_null(_list(COUNT))
_PROMPT_LOGPROBS = _or_null(_list(_or_null({"type": "object", "additionalProperties": OBJECT})))
_FINISH = _one_of("stop", "length", "abort", "tool_calls", "function_call")
_STOP = {"anyOf": [TEXT, COUNT, {"type": "null"}]}
_USAGE = _object(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": _object({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
        "completion_tokens_details": _object(
            {"reasoning_tokens": COUNT, "accepted_prediction_tokens": COUNT, "rejected_prediction_tokens": COUNT}
        ),
    }
)
_LEGACY_LOGPROBS = _object(
    {
        "tokens": _list(TEXT),
        "token_logprobs": _list(_or_null(NUMBER)),
        "top_logprobs": _list(_or_null({"type": "object", "additionalProperties": _or_null(NUMBER)})),
        "text_offset": _list(COUNT),
    }
)
_TOKEN: Mapping[str, Schema] = {"token": TEXT, "logprob": _or_null(NUMBER), "bytes": _or_null(_list(COUNT))}
_CHAT_LOGPROBS = _object(
    {
        "content": _or_null(_list(_object({**_TOKEN, "top_logprobs": _list(_object(_TOKEN))}))),
        "refusal": {"type": "null"},
    }
)
_CALL = _object(
    {"id": TEXT, "type": _one_of("function", "custom")},
    {"function": _object({"name": TEXT, "arguments": TEXT}), "custom": _object({"name": TEXT, "input": TEXT})},
)
_CHAT_MESSAGE = _object(
    {"role": _const("assistant"), "content": _or_null(TEXT), "refusal": {"type": "null"}},
    {
        "tool_calls": _list(_CALL),
        "function_call": _object({"name": TEXT, "arguments": TEXT}),
        "reasoning": TEXT,
        "reasoning_content": TEXT,
    },
)
_MODEL_CARD = _object(
    {
        "id": TEXT,
        "object": _const("model"),
        "created": COUNT,
        "owned_by": TEXT,
        "max_model_len": COUNT,
        "root": TEXT,
        "type": _const("model"),
        "display_name": TEXT,
        "created_at": TEXT,
        "max_input_tokens": COUNT,
    }
)
_RESPONSE = _object(
    {
        "id": TEXT,
        "object": _const("response"),
        "created_at": COUNT,
        "completed_at": _or_null(COUNT),
        "status": _one_of("queued", "in_progress", "completed", "incomplete", "cancelled", "failed"),
        "error": _or_null(_object({"code": TEXT, "message": TEXT})),
        "incomplete_details": _or_null(_object({"reason": TEXT})),
        "model": TEXT,
        "service_tier": TEXT,
        "usage": _or_null(
            _object(
                {
                    "input_tokens": COUNT,
                    "input_tokens_details": _object({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
                    "output_tokens": COUNT,
                    "output_tokens_details": _object({"reasoning_tokens": COUNT}),
                    "total_tokens": COUNT,
                }
            )
        ),
        "output": _list(OBJECT),
        "instructions": _or_null(TEXT),
        "previous_response_id": _or_null(TEXT),
        "store": FLAG,
        "max_output_tokens": _or_null({"type": "integer"}),
        "temperature": NUMBER,
        "top_p": NUMBER,
        "presence_penalty": NUMBER,
        "frequency_penalty": NUMBER,
        "text": OBJECT,
        "reasoning": OBJECT,
        "tools": _list(OBJECT),
        "tool_choice": {"anyOf": [TEXT, OBJECT]},
        "parallel_tool_calls": FLAG,
        "top_logprobs": COUNT,
        "metadata": {"type": "object", "additionalProperties": TEXT},
        "user": _or_null(TEXT),
        "safety_identifier": _or_null(TEXT),
        "prompt_cache_key": _or_null(TEXT),
        "truncation": _one_of("auto", "disabled"),
        "background": FLAG,
        "conversation": {"type": "null"},
        "max_tool_calls": {"type": "null"},
        "prompt": {"type": "null"},
    }
)

ANSWERS: Mapping[str, Schema] = {
    "Completion": _object(
        {
            "id": TEXT,
            "object": _const("text_completion"),
            "created": COUNT,
            "model": TEXT,
            "choices": _list(
                _object(
                    {
                        "index": COUNT,
                        "text": TEXT,
                        "logprobs": _or_null(_LEGACY_LOGPROBS),
                        "finish_reason": _FINISH,
                        "stop_reason": _STOP,
                        "token_ids": _IDS,
                        "prompt_token_ids": _IDS,
                        "prompt_logprobs": _PROMPT_LOGPROBS,
                    }
                )
            ),
            "usage": _USAGE,
        },
        {"service_tier": TEXT, "timings": _list(OBJECT)},
    ),
    "ChatCompletion": _object(
        {
            "id": TEXT,
            "object": _const("chat.completion"),
            "created": COUNT,
            "model": TEXT,
            "choices": _list(
                _object(
                    {
                        "index": COUNT,
                        "message": _CHAT_MESSAGE,
                        "logprobs": _or_null(_CHAT_LOGPROBS),
                        "finish_reason": _FINISH,
                        "stop_reason": _STOP,
                        "token_ids": _IDS,
                    }
                )
            ),
            "usage": _USAGE,
            "prompt_token_ids": _IDS,
            "prompt_logprobs": _PROMPT_LOGPROBS,
        },
        {"service_tier": TEXT, "timings": _list(OBJECT)},
    ),
    "Response": _RESPONSE,
    "DeletedResponse": _object({"id": TEXT, "object": _const("response"), "deleted": FLAG}),
    "ItemList": _object(
        {
            "object": _const("list"),
            "data": _list(OBJECT),
            "first_id": _or_null(TEXT),
            "last_id": _or_null(TEXT),
            "has_more": FLAG,
        }
    ),
    "Message": _object(
        {
            "id": TEXT,
            "type": _const("message"),
            "role": _const("assistant"),
            "model": TEXT,
            "content": _list({"type": "object", "properties": {"type": TEXT}, "required": ["type"]}),
            "stop_reason": TEXT,
            "stop_sequence": _or_null(TEXT),
            "usage": _object(
                {
                    "input_tokens": COUNT,
                    "cache_creation_input_tokens": COUNT,
                    "cache_read_input_tokens": COUNT,
                    "output_tokens": COUNT,
                }
            ),
        }
    ),
    "TokenCount": _object({"input_tokens": COUNT}),
    "InputTokens": _object({"object": _const("response.input_tokens"), "input_tokens": COUNT}),
    "EmbeddingList": _object(
        {
            "object": _const("list"),
            "data": _list(
                _object(
                    {
                        "object": _const("embedding"),
                        "index": COUNT,
                        "embedding": {"anyOf": [_list(NUMBER), TEXT]},
                    }
                )
            ),
            "model": TEXT,
            "usage": _object(
                {
                    "prompt_tokens": COUNT,
                    "total_tokens": COUNT,
                    "prompt_tokens_details": _object({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
                }
            ),
        }
    ),
    "Tokens": _object(
        {"count": COUNT, "max_model_len": COUNT, "tokens": _list(COUNT), "token_strs": _or_null(_list(TEXT))}
    ),
    "TokenText": _object({"prompt": TEXT}),
    "ModelList": _object(
        {
            "object": _const("list"),
            "data": _list(_MODEL_CARD),
            "first_id": TEXT,
            "last_id": TEXT,
            "has_more": _const(False),
        }
    ),
    "ModelCard": _MODEL_CARD,
    "Health": _object(
        {
            "status": _one_of("ready", "not ready"),
            "prefill_workers": COUNT,
            "decode_workers": COUNT,
            "mixed_workers": COUNT,
            "requests": COUNT,
        }
    ),
    "DecodeHealth": _object(
        {"status": _one_of("ready", "not ready"), "decoded_s_ago": _or_null(NUMBER), "problem": TEXT}
    ),
    "Load": _object(
        {
            "router": TEXT,
            "ready": FLAG,
            "requests": COUNT,
            "max_requests": COUNT,
            "mean_s": NUMBER,
            "level": _object({"ttft_s": NUMBER, "tpot_s": NUMBER}),
            "now": _FORECAST,
            "idle": _FORECAST,
        }
    ),
    "Version": _object({"version": TEXT}),
    "OpenApiDocument": OBJECT,
    "DashboardData": OBJECT,  # of the page's own; docs/dashboard.md describes it
    "Error": _object(
        {"error": _object({"message": TEXT, "type": TEXT, "param": _or_null(TEXT), "code": _or_null(TEXT)})}
    ),
    "MessagesError": _object(
        {
            "type": _const("error"),
            "error": _object({"type": TEXT, "message": TEXT}, {"details": _object({"error_code": TEXT})}),
            "request_id": TEXT,
        }
    ),
}
