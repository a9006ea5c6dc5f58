"""A model's dialect is chosen by its chat template, or named by settings."""

from typing import get_args

import pytest

from diptych.cluster.common.config import ReasoningParser, ToolParser
from diptych.cluster.dialects.dialect import FORMATS, REASONING, find_dialect
from diptych.cluster.dialects.shapes import SHAPES
from diptych.cluster.dialects.thoughts import MAGISTRAL, THINK, ThoughtState

# Lines as the families' templates have them.
TEMPLATES = {
    "hermes": '{{- \'\\n<tool_call>\\n{"name": "\' }}{{- tool_call.name }}',
    "qwen3_xml": "{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}",
    "glm45": "{{ '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>",
    "llama3_json": '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name\' }}',
    "pythonic": "{{- '<|python_start|>' }}{% for tool_call in message.tool_calls %}",
    "mistral": "{{ '[TOOL_CALLS] [' }}{{ tool_call.function|tojson }}",
    "mistral_v11": "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "deepseek_v3": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '\\n' + '```json' + '\\n'}}",
    "deepseek_v31": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] }}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>",
    "harmony": "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking }}",
}


def test_settings_parsers_and_grammars_have_the_same_names() -> None:
    assert get_args(ToolParser) == ("auto", "none", *FORMATS)
    assert get_args(ReasoningParser) == ("auto", "none", *REASONING)
    assert TEMPLATES.keys() == FORMATS.keys() == SHAPES.keys()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_its_format(name: str) -> None:
    found = find_dialect(TEMPLATES[name])
    assert found.tools is FORMATS[name]
    assert found.thoughts is None
    assert find_dialect("<think>" + TEMPLATES[name]).thoughts == (None if name == "harmony" else THINK)


def test_settings_win_over_the_template() -> None:
    assert find_dialect(TEMPLATES["hermes"], "pythonic").tools is FORMATS["pythonic"]
    assert find_dialect(TEMPLATES["hermes"] + "<think>", "none", "none") == find_dialect(None)
    assert find_dialect(None, "none", "magistral").thoughts is MAGISTRAL


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("<|im_start|>assistant\n", ThoughtState.FREE),
        ("<|im_start|>assistant\n<think>\n", ThoughtState.OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ThoughtState.DONE),
        ("<｜Assistant｜></think>", ThoughtState.DONE),
        ("say <think>", ThoughtState.OPEN),
        ("<think> was said", ThoughtState.FREE),
    ],
)
def test_a_prompt_tells_whether_the_answer_begins_in_a_thought(prompt: str, state: ThoughtState) -> None:
    assert find_dialect("<think>").state_after(prompt) is state


def test_without_tools_calls_are_text_but_channels_stay() -> None:
    assert find_dialect(TEMPLATES["hermes"]).without_tools().tools is None
    assert find_dialect(TEMPLATES["harmony"]).without_tools().tools is FORMATS["harmony"]
