"""Grammars over the vocabulary of the FakeRunner: token 0 ends, 1 to 256 are the bytes, the rest pairs of letters."""

from itertools import product
from string import ascii_lowercase

from llguidance import LLTokenizer, TokenizerWrapper

from diptych.workers.common.request import Grammar, GrammarKind
from diptych.workers.grammar.compiler import CompiledGrammar, GrammarCompiler

_PAIRS = [(a + b).encode() for a, b in product(ascii_lowercase, ascii_lowercase)]


class _Bytes:
    """Tokenizer, as TokenizerWrapper takes it."""

    def __init__(self, vocab_size: int) -> None:
        self.eos_token_id, self.bos_token_id = 0, None
        self.tokens = [b"<end>", *(bytes([i]) for i in range(256)), *_PAIRS]
        self.tokens = (self.tokens + [f"<{i}>".encode() for i in range(vocab_size)])[:vocab_size]
        self.special_token_ids = [0, *range(257 + len(_PAIRS), vocab_size)]

    def __call__(self, text: bytes) -> list[int]:
        return [byte + 1 for byte in text if byte + 1 < len(self.tokens)]


def text_of(token_ids: list[int], vocab_size: int = 1000) -> str:
    """Text of an answer, without the token that ends it."""
    tokens = _Bytes(vocab_size).tokens
    return b"".join(tokens[i] for i in token_ids if i).decode()


def compiler(vocab_size: int = 1000) -> GrammarCompiler:
    return GrammarCompiler(lambda: LLTokenizer(TokenizerWrapper(_Bytes(vocab_size)), n_vocab=vocab_size))


def regex(pattern: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, pattern)


def compiled(grammar: Grammar, vocab_size: int = 1000) -> CompiledGrammar:
    return compiler(vocab_size).compile(grammar)
