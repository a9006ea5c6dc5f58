"""Text around the arguments of calls, in the formats that models write."""

import enum
from dataclasses import dataclass

from . import harmony, mistral, tagged, xml

NAME, NUMBER = "{name}", "{number}"  # in a text: the tool's, and the call's, which any small number may be


class ArgumentsKind(enum.Enum):
    JSON = "json"  # object
    QWEN = "qwen"  # tags of parameters
    GLM = "glm"  # tags of keys and values
    PYTHON = "python"  # keywords


@dataclass(frozen=True, slots=True)
class Shape:
    """Calls are `opening`, calls with `between` among them, `closing`; a call is `before`, its arguments, `after`."""

    opening: str
    before: str
    after: str
    between: str | None  # None: an answer has one call
    closing: str = ""
    trigger: str = ""  # beginning of `opening`, which no text has; "": text does not begin as calls do
    arguments: ArgumentsKind = ArgumentsKind.JSON


def _tool_call(before: str, after: str, arguments: ArgumentsKind) -> Shape:
    begin, end = tagged.TOOL_CALL, tagged.END_TOOL_CALL
    return Shape(begin, before, after + end, f"\n{begin}", trigger=begin, arguments=arguments)


def _deepseek(before: str, after: str, between: str) -> Shape:
    marks = tagged.DeepSeek
    return Shape(
        marks.calls, marks.call + before, after + marks.end_call, between, marks.end_calls, trigger=marks.calls
    )


SHAPES = {
    "hermes": _tool_call(f'\n{{"name": "{NAME}", "arguments": ', "}\n", ArgumentsKind.JSON),
    "qwen3_xml": _tool_call(f"\n{xml.FUNCTION}{NAME}>\n", f"{xml.END_FUNCTION}\n", ArgumentsKind.QWEN),
    "glm45": _tool_call(f"{NAME}\n", "", ArgumentsKind.GLM),
    "llama3_json": Shape("", f'{{"name": "{NAME}", "parameters": ', "}", "; "),
    "pythonic": Shape("[", f"{NAME}(", ")", ", ", "]", arguments=ArgumentsKind.PYTHON),
    "mistral": Shape(f"{mistral.CALLS} [", f'{{"name": "{NAME}", "arguments": ', "}", ", ", "]", trigger=mistral.CALLS),
    "mistral_v11": Shape(mistral.CALLS, f"{NAME}{mistral.ARGUMENTS}", "", mistral.CALLS, trigger=mistral.CALLS),
    "deepseek_v3": _deepseek(f"function{tagged.DeepSeek.separator}{NAME}\n```json\n", "\n```", "\n"),
    "deepseek_v31": _deepseek(f"{NAME}{tagged.DeepSeek.separator}", "", ""),
    "kimi_k2": Shape(
        tagged.Kimi.calls,
        f"{tagged.Kimi.call}functions.{NAME}:{NUMBER}{tagged.Kimi.arguments}",
        tagged.Kimi.end_call,
        "",
        tagged.Kimi.end_calls,
        trigger=tagged.Kimi.calls,
    ),
    "harmony": Shape(
        f"{harmony.CHANNEL}{harmony.COMMENTARY} to=functions.",
        f"{NAME} {harmony.CONSTRAIN}json{harmony.MESSAGE}",
        "",
        None,
    ),
}
FIRST_OF_TEXT = {"llama3_json": r"[^{<\s]", "pythonic": r"[^\[<\s]"}  # so that no text begins as calls do
