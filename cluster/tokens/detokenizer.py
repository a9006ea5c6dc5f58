"""Incremental detokenisation: the pieces that `push` and the last `flush` return, joined, are the text of all tokens.

A character that is split over tokens comes out whole, with its last token; U+FFFD comes out only where the bytes are no
UTF-8, so that more tokens would not mend it.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

import tokenizers
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"
NUM_CONTEXT_TOKENS = 6  # of the prompt, for decoders that write a word's first space only after something
MAX_CHARACTER_BYTES = 4
MAX_HELD_TOKENS = 8  # a character has four bytes at most: a longer run that is no text will never become one


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        ...

    def flush(self) -> str:
        """What is left once no token follows."""
        ...


class ByteDetokenizer:
    """Byte-level vocabularies: each token is some bytes, and the text is their UTF-8. Exact for any tokens."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._decode(b"", True)


class StreamDetokenizer:
    """All other vocabularies: the library's DecodeStream, begun anew after tokens that never become text."""

    def __init__(
        self, backend: tokenizers.Tokenizer, prompt_token_ids: Sequence[int], *, skip_special: bool = True
    ) -> None:
        self._backend = backend
        self._skip_special = skip_special
        # A context that begins within a character reads as none: up to three tokens more have its other bytes.
        contexts = [list(prompt_token_ids[-NUM_CONTEXT_TOKENS - n :]) for n in range(MAX_CHARACTER_BYTES)]
        self._restart(next((c for c in contexts if not self._decode(c).endswith(REPLACEMENT)), []))

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        try:
            piece = self._stream.step(self._backend, token_id)
        except Exception:  # noqa: BLE001 - "invalid prefix", for which the library has no narrower class
            return self.flush()
        if piece is None:
            return self.flush() if len(self._held) >= MAX_HELD_TOKENS else ""
        self._context, self._held = self._held, []
        return piece

    def flush(self) -> str:
        shown = self._decode(self._context)
        piece = self._decode(self._context + self._held)[len(shown) :]
        self._restart(self._held or self._context)
        return piece

    def _restart(self, context: list[int]) -> None:
        # A stream that starts on an unfinished character would show it a second time.
        self._context = [] if self._decode(context).endswith(REPLACEMENT) else context
        self._held: list[int] = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip_special)

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=self._skip_special)
