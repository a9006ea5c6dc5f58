"""Reads a checkpoint's tokenizer as grammars need it: which tokens are text is what its file says.

llguidance itself takes every added token in angle brackets as special (`<tool_call>` and `</think>` of Qwen 3 are
text), and tokenises a forced text that spells a special token as that token, which the grammar then refuses.
"""

import json
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper


def read_tokenizer(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Read tokenizer.json. Raises whatever the library does where it cannot be used."""
    ends = list(eos_token_ids)
    encoder = LLTokenizer(str(path), n_vocab=vocab_size, eos_token=ends, slices=[])
    added = json.loads(path.read_bytes()).get("added_tokens") or ()
    texts = {token["id"] for token in added if not token["special"]}.difference(ends)
    return LLTokenizer(TokenizerWrapper(_TextTokens(encoder, texts)), eos_token=ends)


def added_token(tokenizer: LLTokenizer, text: str) -> int | None:
    """Return the id of the token that is this text and not special; None where there is none."""
    found = tokenizer.tokenize_str(text)
    return found[0] if len(found) == 1 else None


class _TextTokens:
    """Tokenizer, as TokenizerWrapper takes it. `texts`: added tokens that are text."""

    def __init__(self, encoder: LLTokenizer, texts: set[int]) -> None:
        ids = range(encoder.vocab_size)
        self.eos_token_id, self.bos_token_id = encoder.eos_token, None
        self.tokens = [encoder.decode_bytes([i]) for i in ids]
        self._special = frozenset(i for i in ids if encoder.is_special_token(i) and i not in texts)
        self.special_token_ids = sorted(self._special)
        self._encoder = encoder

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text, none of them special."""
        found = self._encoder.tokenize_bytes(text)
        if self._special.isdisjoint(found):
            return found
        return [i for token_id in found for i in self._spelt(token_id)]

    def _spelt(self, token_id: int) -> list[int]:
        if token_id not in self._special:
            return [token_id]
        return self._encoder.greedy_tokenize(self.tokens[token_id].decode(errors="replace"))
