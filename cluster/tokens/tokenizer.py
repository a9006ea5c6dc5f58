"""Converts text to token ids and back, by a `tokenizer.json` (or its conversion) and `tokenizer_config.json`.

Encoding equals Hugging Face's fast tokenizers, without importing transformers (which would import torch). As there,
`tokenizer.json` alone says which special tokens a text gets: add_bos_token of the config is not read.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers

from ...workers.common.errors import CheckpointError, InvalidRequest
from .chat_template import SPECIAL_TOKENS, ChatTemplate, Message, PromptEnd, find_source, read_json
from .detokenizer import ByteDetokenizer, Detokenizer, SelectiveDetokenizer, StreamDetokenizer
from .tokenizer_conversion import tokenizer_folder
from .tokenizer_files import TOKENIZER_FILE

_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")


class Tokenizer:
    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any], template: str | None) -> None:
        """`config`: of tokenizer_config.json; `template`: source of the chat template, if any."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._config, self._source = config, template
        special = {name: text for name in SPECIAL_TOKENS if (text := _content(config.get(name))) is not None}
        _mark_special(backend, [*special.values(), *_extra_special(config)])
        added = backend.get_added_tokens_decoder()
        self._added_ids, self._special_ids = frozenset(added), frozenset(i for i, t in added.items() if t.special)
        self._special = special
        self._template: ChatTemplate | None = None
        # A text with more than n times this many characters has more than n tokens.
        self.max_token_chars = max(map(len, backend.get_vocab()), default=1)
        self._decoders = _decoder_types(backend)
        self._bytes_of = cache(self._find_bytes)
        self._shown_bytes_of = cache(lambda i: b"" if i in self._special_ids else self._bytes_of(i))

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read a checkpoint's tokenizer, converted first where it is no tokenizer.json. Raises CheckpointError."""
        with tokenizer_folder(folder) as home:
            return cls._read(folder, home)

    @classmethod
    def _read(cls, folder: Path, home: Path) -> "Tokenizer":
        """`home`: folder of tokenizer.json."""
        path = home / TOKENIZER_FILE
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises no narrower class
            raise CheckpointError(f"cannot read {path}: {e}. Download the checkpoint again") from e
        # Values of the checkpoint replace those that a conversion adds.
        settings = (place / name for place in dict.fromkeys((home, folder)) for name in _SETTINGS)
        config = {key: value for path in settings for key, value in read_json(path).items()}
        return cls(backend, config, find_source(folder, config))

    @classmethod
    def from_state(cls, state: bytes) -> "Tokenizer":
        """Tokenizer from the `state` that another process wrote."""
        given = json.loads(state)
        return cls(tokenizers.Tokenizer.from_str(given["backend"]), given["config"], given["template"])

    def state(self) -> bytes:
        return json.dumps(
            {"backend": self._backend.to_str(), "config": dict(self._config), "template": self._source}
        ).encode()

    @property
    def vocab_size(self) -> int:
        """Number of tokens with a name, added ones included. Ids may be larger where they have gaps."""
        return self._backend.get_vocab_size()

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token ids by the tokens' names, added ones included."""
        return self._backend.get_vocab()

    @property
    def has_chat_template(self) -> bool:
        return self._source is not None

    @property
    def template(self) -> str | None:
        """Source of the chat template, if any."""
        return self._source

    def compile_template(self) -> None:
        """Compile the chat template, if any. Time and memory are not bounded: a hostile template may be large, or have
        large constants. Raises CheckpointError."""
        if self._template is None and self._source is not None:
            self._template = ChatTemplate(self._source, self._special)

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of a text. `special`: add the tokens of the tokenizer's post-processor, as a first bos token."""
        # The batch call lets other threads run, and keeps no offsets.
        return tuple(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Text of the tokens, without special ones unless `special`."""
        # The batch call lets other threads run.
        return self._backend.decode_batch([token_ids], skip_special_tokens=not special)[0]

    def render_chat(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, object]] = (),
        documents: Sequence[Mapping[str, object]] = (),
        *,
        end: PromptEnd = PromptEnd.HEADER,
        max_chars: int | None = None,
    ) -> str:
        """Prompt of a conversation, with its special tokens. Time and memory are the template's, but the text stops
        beyond `max_chars`. Raises InvalidRequest."""
        self.compile_template()
        if self._template is None:
            raise InvalidRequest("the model has no chat template: send a plain prompt instead", param="messages")
        return self._template.render(messages, options, tools, documents, end=end, max_chars=max_chars)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token; of a special one, its name; b"" for an id without a token."""
        return self._bytes_of(token_id)

    def token_name(self, token_id: int) -> str:
        """Name of a token in the vocabulary; "" for an id without a token."""
        return self._backend.id_to_token(token_id) or ""

    def special_text(self, token_id: int) -> str:
        """Name of a special token; "" for any other."""
        return self._bytes_of(token_id).decode() if token_id in self._special_ids else ""

    def special_id(self, text: str) -> int | None:
        """Id of the special token with this text, None where there is none."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    def single_id(self, text: str) -> int | None:
        """Id of the token that is all of this text wherever it stands, None where there is none."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._added_ids else None

    def detokenizer(
        self, prompt_token_ids: Sequence[int] = (), *, special: bool = False, shown: Collection[str] = ()
    ) -> Detokenizer:
        """Detokenizer for the tokens after a prompt. Leaves out special ones unless `special`, except those with the
        texts `shown`."""
        if shown and not special:
            return self._selective(prompt_token_ids, shown)
        if "ByteLevel" in self._decoders:
            return ByteDetokenizer(self._bytes_of if special else self._shown_bytes_of)
        return StreamDetokenizer(self._backend, prompt_token_ids, skip_special=not special)

    def _selective(self, prompt_token_ids: Sequence[int], shown: Collection[str]) -> Detokenizer:
        hidden = self._special_ids - {self.special_id(text) for text in shown}
        if "ByteLevel" in self._decoders:
            return ByteDetokenizer(lambda i: b"" if i in hidden else self._bytes_of(i))
        return SelectiveDetokenizer(StreamDetokenizer(self._backend, prompt_token_ids, skip_special=False), hidden)

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special_ids:
            return token.encode()
        if "ByteLevel" in self._decoders:
            # As in the library's decoder, a token with a character outside the table is its own text.
            known = [_BYTE_OF.get(char) for char in token]
            return token.encode() if None in known else bytes(b for b in known if b is not None)
        if "ByteFallback" in self._decoders and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        if self._decoders & {"Metaspace", "Replace"}:
            return token.replace("▁", " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()


def _byte_table() -> dict[str, int]:
    """Map from character to byte in byte-level BPE: printable Latin-1 to itself, U+0100 and on to the rest (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_table()


def _content(token: object) -> str | None:
    """Text of a special token, which is written as a text or as {"content": text, …}."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _extra_special(config: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(name)
        entries = listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else ()
        found += [text for entry in entries if (text := _content(entry)) is not None]
    return found


def _mark_special(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> None:
    """Mark those named tokens of the vocabulary as special that tokenizer.json does not mark."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([t for t in texts if t not in added and backend.token_to_id(t) is not None])


def _decoder_types(backend: tokenizers.Tokenizer) -> frozenset[str]:
    decoder = backend.decoder
    if decoder is None:
        return frozenset()
    state = json.loads(decoder.__getstate__())
    parts = state.get("decoders", ()) if state["type"] == "Sequence" else ()
    return frozenset({state["type"], *(part["type"] for part in parts)})
