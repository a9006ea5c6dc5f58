"""Incremental detokenisation: the pieces that `push` and the last `flush` return join to the text of all tokens.

A character that is split over tokens is returned whole, with its last token. U+FFFD is returned only where the bytes
are not UTF-8, whatever tokens follow.
"""

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import tokenizers
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"
NUM_CONTEXT_TOKENS = 6  # of the prompt, for decoders that drop a space at the beginning of the text
MAX_CHARACTER_BYTES = 4
MAX_HELD_TOKENS = 8  # a character has at most four bytes: a longer run that is no text never becomes text


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Add a token. Returns the text that it completes."""
        ...

    def flush(self) -> str:
        """Text that is left when no token follows."""
        ...


class ByteDetokenizer:
    """Detokenizer for byte-level vocabularies: a token is some bytes, the text their UTF-8. Exact for any tokens."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._decode(b"", True)


class StreamDetokenizer:
    """Detokenizer for other vocabularies: the library's DecodeStream, restarted after tokens that never become text."""

    def __init__(
        self, backend: tokenizers.Tokenizer, prompt_token_ids: Sequence[int], *, skip_special: bool = True
    ) -> None:
        self._backend = backend
        self._skip_special = skip_special
        # A context that begins within a character is not decoded: up to three more tokens hold its other bytes.
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
        # A stream that starts on an incomplete character would return it twice.
        self._context = [] if self._decode(context).endswith(REPLACEMENT) else context
        self._held: list[int] = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip_special)

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=self._skip_special)


class SelectiveDetokenizer:
    """Detokenizer that leaves out some tokens."""

    def __init__(self, detokenizer: Detokenizer, hidden: Collection[int]) -> None:
        self._detokenizer = detokenizer
        self._hidden = hidden

    def push(self, token_id: int) -> str:
        return "" if token_id in self._hidden else self._detokenizer.push(token_id)

    def flush(self) -> str:
        return self._detokenizer.flush()
