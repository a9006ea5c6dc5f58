"""Plan of a chat's answer: whether it is parsed for thoughts and calls, and what grammar it follows then."""

from dataclasses import dataclass

from ...workers.common.errors import InvalidRequest
from ...workers.common.request import Grammar, ThoughtBudget
from ..dialects.dialect import Dialect
from ..dialects.grammar import answer_grammar
from ..dialects.reader import AnswerParser
from ..dialects.schemas import Schemas
from ..dialects.thoughts import ThoughtState
from ..dialects.tools import ToolUse
from ..tokens.tokenizer import Tokenizer

NUM_TAIL_TOKENS = 16  # of a prompt, in which it begins or ends a thought


@dataclass(frozen=True, slots=True)
class AskedBudget:
    """Most tokens of a thought, as a client gave them."""

    num_tokens: int
    param: str
    is_hint: bool = False  # without effect on models that have no thoughts, or whose thoughts cannot be bounded


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """Plan for the answers to one prompt."""

    dialect: Dialect
    schemas: Schemas  # of all tools
    thought: ThoughtState
    grammar: Grammar | None

    def parser(self) -> AnswerParser:
        return self.dialect.parser(self.thought, self.schemas)


def check_tools(dialect: Dialect, use: ToolUse) -> None:
    """Raise InvalidRequest where the model's calls could not be read."""
    if use.is_parsed and dialect.tools is None:
        raise InvalidRequest(
            "this model's chat template shows no format of tool calls that is known here: set router.tool_parser, "
            'send tool_choice="none", or leave tools out',
            param="tools",
        )


def thought_state(
    dialect: Dialect, tokenizer: Tokenizer, prompt: tuple[int, ...], continues: str | None
) -> ThoughtState:
    """State of the thought of an answer to `prompt`. `continues`: text of the message that the answer goes on with."""
    if continues is not None and (state := dialect.state_within(continues)) is not None:
        return state
    return dialect.state_after(tokenizer.decode(prompt[-NUM_TAIL_TOKENS:], special=True))


def thought_budget(
    asked: AskedBudget, dialect: Dialect, tokenizer: Tokenizer, state: ThoughtState
) -> ThoughtBudget | None:
    """Budget of the thought that follows a prompt, of which `state` is; None: it has none. Raises InvalidRequest."""
    if asked.num_tokens < 0:
        raise InvalidRequest(f"{asked.param} must be at least 0, got {asked.num_tokens}", param=asked.param)
    marks = dialect.thoughts
    if marks is None:
        why = "its thoughts are channels" if dialect.has_channels else "it has none that this server knows"
    else:
        begin, end = tokenizer.single_id(marks.begin), tokenizer.single_id(marks.end)
        if begin is not None and end is not None:
            is_over = state is ThoughtState.DONE
            return None if is_over else ThoughtBudget(asked.num_tokens, begin, end, state is ThoughtState.OPEN)
        why = f"{marks.begin} and {marks.end} are not one token each"
    if asked.is_hint:
        return None
    raise InvalidRequest(
        f"thoughts of this model cannot be bounded: {why}. Leave {asked.param} out, or set router.reasoning_parser if "
        "the model thinks",
        param=asked.param,
    )


def plan_answer(
    dialect: Dialect,
    use: ToolUse,
    grammar: Grammar | None,
    tokenizer: Tokenizer,
    thought: ThoughtState,
    *,
    continues: bool = False,
) -> AnswerPlan | None:
    """Plan for the answers to a prompt; None: they are text. `grammar`: as the client gave it; `thought`: of the
    prompt; `continues`: the answer goes on with the prompt's last message. Raises InvalidRequest, InvalidGrammar."""
    if continues and dialect.has_channels and (grammar is not None or use.is_constrained):
        raise InvalidRequest(
            "an answer of this model cannot continue a message under a grammar, which begins with a channel: leave one "
            "of the two out",
            param="messages",
        )
    dialect = dialect if use.is_parsed else dialect.without_tools()
    if dialect.tools is None and dialect.thoughts is None:
        return None
    composed = answer_grammar(dialect, thought, use, grammar, tokenizer.special_id)
    return AnswerPlan(dialect, {tool.name: tool.parameters for tool in use.tools}, thought, composed)
