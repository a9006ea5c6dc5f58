"""Dialects: how families of models write thoughts and calls of tools, and which one a model speaks.

    reader.py                 incremental reading of an answer
    tagged, xml, mistral, llama, pythonic, harmony, thoughts        parsers, of one family of formats each
    grammar.py                grammars of answers with calls, in the same formats (shapes.py)

Pure: text in, parts out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..common.config import ReasoningParser, ToolParser
from . import harmony as gpt_oss
from . import llama, mistral, pythonic, tagged, thoughts, xml
from .events import CallBegin
from .reader import AnswerParser, Reader, Steps
from .schemas import Schemas
from .thoughts import CallsInThought, ThoughtMarks, ThoughtState

ReadCalls = Callable[[Reader, Schemas], Steps[None]]
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Way to write calls. `read` reads the answer after its thought. At one of `starts` other text ends, and a call may
    begin."""

    name: str
    read: ReadCalls
    marks: tuple[str, ...] = ()  # that may be special tokens, whose text is left out elsewhere
    starts: tuple[str, ...] = ()
    short_ids: bool = False  # ids of calls have nine letters and digits
    has_channels: bool = False  # harmony: thoughts are its own, and every answer has its marks

    def begins_call(self, text: str, schemas: Schemas) -> bool:
        """Return whether the text begins with a call of a tool that is known."""
        parser = AnswerParser(lambda reader: self.read(reader, schemas))
        first = next(iter(parser.feed(text) + parser.end()), None)
        return isinstance(first, CallBegin) and first.name in schemas


_TAG = (tagged.TOOL_CALL,)
_DEEPSEEK = (tagged.DeepSeek.calls, tagged.DeepSeek.call)
_KIMI = (tagged.Kimi.calls, tagged.Kimi.call)
_MESSAGES = (gpt_oss.START, gpt_oss.CHANNEL, gpt_oss.END, gpt_oss.CALL, gpt_oss.RETURN)
FORMATS = {
    each.name: each
    for each in (
        ToolFormat("hermes", lambda r, _: tagged.hermes(r), (tagged.TOOL_CALL, tagged.END_TOOL_CALL), _TAG),
        ToolFormat("qwen3_xml", xml.qwen_xml, (tagged.TOOL_CALL, tagged.END_TOOL_CALL), (*_TAG, xml.FUNCTION)),
        ToolFormat("llama3_json", llama.llama_json, (llama.PYTHON_TAG,), llama.STARTS),
        ToolFormat("pythonic", pythonic.pythonic, pythonic.ALL, (pythonic.PYTHON_START, pythonic.CALLS)),
        ToolFormat("mistral", lambda r, _: mistral.mistral(r), mistral.ALL, (mistral.CALLS,), short_ids=True),
        ToolFormat("mistral_v11", lambda r, _: mistral.mistral(r), mistral.ALL, (mistral.CALLS,), short_ids=True),
        ToolFormat("deepseek_v3", lambda r, _: tagged.deepseek(r), tagged.DeepSeek.all, _DEEPSEEK),
        ToolFormat("deepseek_v31", lambda r, _: tagged.deepseek(r), tagged.DeepSeek.all, _DEEPSEEK),
        ToolFormat("harmony", lambda r, _: gpt_oss.harmony(r), gpt_oss.ALL, _MESSAGES, has_channels=True),
        ToolFormat("kimi_k2", tagged.kimi, tagged.Kimi.all, _KIMI),
        ToolFormat("glm45", xml.glm, (tagged.TOOL_CALL, tagged.END_TOOL_CALL, *xml.ALL_OF_GLM), _TAG),
    )
}
REASONING = {"think": thoughts.THINK, "magistral": thoughts.MAGISTRAL}

# Texts of a chat template and the format that they show; the first that fits.
_SHOWN: tuple[tuple[tuple[str, ...], str], ...] = (
    ((gpt_oss.CHANNEL, gpt_oss.MESSAGE), "harmony"),
    ((tagged.DeepSeek.calls, "```json"), "deepseek_v3"),
    ((tagged.DeepSeek.calls,), "deepseek_v31"),
    ((tagged.Kimi.call,), "kimi_k2"),
    ((xml.KEY,), "glm45"),
    ((xml.FUNCTION,), "qwen3_xml"),
    ((tagged.TOOL_CALL,), "hermes"),
    ((mistral.CALLS, mistral.ARGUMENTS), "mistral_v11"),
    ((mistral.CALLS,), "mistral"),
    ((pythonic.PYTHON_START,), "pythonic"),
    ((pythonic.CALLS,), "pythonic"),
    (("[func_name1(",), "pythonic"),
    ((llama.PYTHON_TAG,), "llama3_json"),
    (('{"name": function name, "parameters":',), "llama3_json"),
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """Formats of what a model writes besides text. None: it writes nothing of the kind."""

    tools: ToolFormat | None = None
    thoughts: ThoughtMarks | None = None

    @property
    def has_channels(self) -> bool:
        return self.tools is not None and self.tools.has_channels

    @property
    def has_short_ids(self) -> bool:
        return self.tools is not None and self.tools.short_ids

    @property
    def marks(self) -> frozenset[str]:
        """Texts of the tokens that parsers must see."""
        thoughts = () if self.thoughts is None else (self.thoughts.begin, self.thoughts.end)
        return frozenset((*thoughts, *(() if self.tools is None else self.tools.marks)))

    def without_tools(self) -> "Dialect":
        """Dialect of answers in which calls are text."""
        return self if self.has_channels else replace(self, tools=None)

    def state_after(self, prompt: str) -> ThoughtState:
        """State of the thought after a prompt. `prompt`: its last characters."""
        return ThoughtState.FREE if self.thoughts is None else thoughts.state_after(prompt, self.thoughts)

    def state_within(self, message: str) -> ThoughtState | None:
        """State of the thought where an answer goes on with a message; None: the message does not show it."""
        return None if self.thoughts is None else thoughts.state_within(message, self.thoughts)

    def parser(self, state: ThoughtState, schemas: Schemas) -> AnswerParser:
        """Parser of one answer. `schemas`: of all tools."""
        return AnswerParser(lambda reader: self._read(reader, state, schemas))

    def _read(self, reader: Reader, state: ThoughtState, schemas: Schemas) -> Steps[None]:
        if self.thoughts is not None:
            yield from thoughts.thought(reader, self.thoughts, state, self._calls(schemas))
        if self.tools is not None:
            yield from self.tools.read(reader, schemas)
        else:
            yield from reader.rest(reader.text)

    def _calls(self, schemas: Schemas) -> CallsInThought:
        """Calls that may stand in a thought."""
        tools = self.tools
        if tools is None:
            return CallsInThought((), lambda text: False)
        return CallsInThought(tools.starts, lambda text: tools.begins_call(text, schemas))


def find_dialect(
    template: str | None, tool_parser: ToolParser = "auto", reasoning_parser: ReasoningParser = "auto"
) -> Dialect:
    """Dialect of a model. `template`: its chat template's text, which shows the marks, unless the parsers are named."""
    template = template or ""
    tools = FORMATS.get(_shown_format(template) if tool_parser == AUTO else tool_parser)
    marks = _shown_thoughts(template) if reasoning_parser == AUTO else REASONING.get(reasoning_parser)
    return Dialect(tools, None if tools is not None and tools.has_channels else marks)


def _shown_format(template: str) -> str:
    return next((name for texts, name in _SHOWN if all(text in template for text in texts)), "")


def _shown_thoughts(template: str) -> ThoughtMarks | None:
    return next((marks for marks in thoughts.ALL if marks.begin in template or marks.end in template), None)
