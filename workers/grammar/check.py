"""Check of a grammar without a model: whether it can be compiled at all, at a cost that someone else bounds.

It is compiled for a vocabulary of single bytes, and its first mask is made: what takes long with a model's tokens (to
find out which lexemes can match anything) takes as long with these. Where a grammar names tokens of the model, by their
ids or their texts, the check takes one of its own instead.
"""

import re

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ..common.request import Grammar
from .large_stack import on_stack
from .limits import CHECK_STACK_BYTES, LIMITS
from .text import invalid, to_llguidance

_TOKEN_IDS = re.compile(r"<\[\^?[0-9][0-9, -]*\]>")


class GrammarCheck:
    def __init__(self) -> None:
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))

    def check(self, grammar: Grammar) -> None:
        """Raise InvalidGrammar for a grammar that cannot be compiled, whatever the model's tokens are. May take any
        time and memory, or end the process: a router lets a process of its own do it."""
        why = on_stack(CHECK_STACK_BYTES, lambda: self._why_not(to_llguidance(grammar, lambda _: 0)))
        if why:
            raise invalid(grammar, why)

    def _why_not(self, text: str) -> str:
        """Return why it cannot be compiled; empty: it can."""
        text = _TOKEN_IDS.sub(f"<[{len(_Bytes.tokens) - 1}]>", text)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher.get_error() if matcher.is_error() else ""


class _Bytes:
    """Tokenizer, as TokenizerWrapper takes it: token 0 ends, the others are the bytes."""

    eos_token_id, bos_token_id = 0, None
    tokens = (b"<end>", *(bytes([i]) for i in range(256)))
    special_token_ids = (0,)

    def __call__(self, text: bytes) -> list[int]:
        return [byte + 1 for byte in text]
