"""Makes synthetic prompts of a given length, as token ids or as text of as many tokens. Seeded."""

import re
from array import array
from functools import cached_property

import numpy as np

from ...workers.common.errors import ConfigError
from ..tokens.tokenizer import Tokenizer
from .types import TOKEN_ID, Text

FIRST_ID = 10  # the first ids of many vocabularies are special tokens
MIN_WORDS = 64
MAX_FITS = 8
_WORD = re.compile(rb"[ ][A-Za-z]+")


class TokenText:
    """Source of token ids from [10, vocab_size), for endpoints that take token ids."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size <= FIRST_ID:
            raise ConfigError(f"--vocab-size must be above {FIRST_ID}, got {vocab_size}")
        self._vocab_size = vocab_size

    def make(self, num_tokens: int, rng: np.random.Generator) -> Text:
        return array(TOKEN_ID, rng.integers(FIRST_ID, self._vocab_size, num_tokens).tolist())

    def join(self, parts: list[Text]) -> Text:
        joined = array(TOKEN_ID)
        for part in parts:
            assert isinstance(part, array)
            joined += part
        return joined

    def cut(self, text: Text, num_tokens: int) -> Text:
        return text[:num_tokens]


class WordText:
    """Source of texts of words of a tokenizer's vocabulary. A word with its leading space is always one token, so a
    text of n words has n tokens, and its first words are its first tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _words(self) -> list[str]:
        encode, token_bytes = self._tokenizer.encode, self._tokenizer.token_bytes
        words = [w.decode() for i in range(self._tokenizer.vocab_size) if _WORD.fullmatch(w := token_bytes(i))]
        whole = [w for w in words if len(encode(w, special=False)) == 1]
        if len(whole) < MIN_WORDS:
            raise ConfigError(
                f"the tokenizer has {len(whole)} tokens that are a word after a space, but {MIN_WORDS} are needed "
                "to make prompts. Leave out --tokenizer, so that prompts are sent as token ids"
            )
        return whole

    def make(self, num_tokens: int, rng: np.random.Generator) -> Text:
        """Number of tokens of a text, without special tokens that the server adds."""
        words = self._words
        chosen = [words[i] for i in rng.integers(0, len(words), num_tokens)]
        for _ in range(MAX_FITS):
            text = "".join(chosen)
            excess = len(self._tokenizer.encode(text, special=False)) - num_tokens
            if excess == 0:
                break
            chosen = chosen[:-excess] if excess > 0 else chosen + chosen[:-excess]
        return "".join(chosen)

    def join(self, parts: list[Text]) -> Text:
        return "".join(part for part in parts if isinstance(part, str))

    def cut(self, text: Text, num_tokens: int) -> Text:
        """First `num_tokens` words of a text."""
        assert isinstance(text, str)
        return "".join(f" {word}" for word in text.split(" ")[1 : num_tokens + 1])


TextSource = TokenText | WordText
