"""GGUF files that hold a vocabulary alone, written of a tokenizer with the gguf package, as llama.cpp does."""

import json
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
import tokenizers
from gguf import TokenType


def write_bpe(path: Path, backend: tokenizers.Tokenizer, pre: str | None, **settings: Any) -> Path:
    """Write a byte-level BPE. settings: bos, eos, pad: texts of tokens; add_bos; chat_template; arch."""
    state = json.loads(backend.to_str())
    added = {token["id"]: token for token in state["added_tokens"]}
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    writer = _writer(path, settings)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([_kind_of(added.get(i)) for i in range(len(tokens))])
    merges = (" ".join(merge) if isinstance(merge, list) else merge for merge in state["model"]["merges"])
    writer.add_token_merges(list(merges))
    return _finished(writer, path, tokens, settings)


def _kind_of(added: dict[str, Any] | None) -> TokenType:
    if added is None:
        return TokenType.NORMAL
    return TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED


def write_sentencepiece(path: Path, model: Path, **settings: Any) -> Path:
    """Write a sentencepiece model's pieces, scores and types."""
    of = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = range(of.vocab_size())
    tokens = [of.IdToPiece(i) for i in ids]
    writer = _writer(path, settings)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([of.GetScore(i) for i in ids])
    user = set(settings.get("user", ()))
    writer.add_token_types(
        [
            TokenType.UNKNOWN
            if of.IsUnknown(i)
            else TokenType.CONTROL
            if of.IsControl(i)
            else TokenType.BYTE
            if of.IsByte(i)
            else TokenType.USER_DEFINED
            if tokens[i] in user
            else TokenType.NORMAL
            for i in ids
        ]
    )
    if "space_prefix" in settings:
        writer.add_add_space_prefix(settings["space_prefix"])
    return _finished(writer, path, tokens, settings | {"unk": of.IdToPiece(of.unk_id())})


def _writer(path: Path, settings: dict[str, Any]) -> gguf.GGUFWriter:
    path.parent.mkdir(parents=True, exist_ok=True)
    return gguf.GGUFWriter(path, settings.get("arch", "llama"))


def _finished(writer: gguf.GGUFWriter, path: Path, tokens: list[str], settings: dict[str, Any]) -> Path:
    for name in ("bos", "eos", "unk", "pad"):
        if name in settings:
            getattr(writer, f"add_{name}_token_id")(tokens.index(settings[name]))
    if "add_bos" in settings:
        writer.add_add_bos_token(settings["add_bos"])
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path
