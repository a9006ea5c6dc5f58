"""Reads the vocabulary of a GGUF model's metadata, checked. No torch, and no tokenizer: cluster/tokens/ makes one."""

from dataclasses import asdict, dataclass
from typing import Any, cast

from ...common.errors import CheckpointError
from .gguf_files import GgufModel

PREFIX = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6  # types of tokens; others are normal
# Texts of tokens that end an answer, whatever else a file names (llama.cpp, src/llama-vocab.cpp).
_CONVERSATION = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|eom_id|>"}
ENDS = _CONVERSATION | {"<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "<end_of_utterance>"}
HARMONY = {"<|return|>", "<|call|>", "<|end|>"}  # gpt-oss


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Tokens, and how text becomes them."""

    model: str  # llama: sentencepiece's BPE by scores; gpt2: byte-level BPE by merges
    pre: str  # name of the regular expression that cuts texts; "": none is named
    architecture: str
    tokens: list[str]
    types: list[int]
    scores: list[float]  # of llama alone
    merges: list[str]  # of gpt2 alone
    special: dict[str, int]  # ids of bos, eos, unk, pad, sep, mask, where there are
    add_bos: bool | None  # None: what the model's kind has
    add_eos: bool | None
    add_space_prefix: bool
    chat_template: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


MODELS = ("gpt2", "llama")
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}


def read_vocabulary(model: GgufModel) -> GgufVocabulary:
    """Raises CheckpointError naming the key that is missing, damaged or of a kind that is not read."""
    kind = _value(model, "model", str)
    if kind not in MODELS:
        raise CheckpointError(
            f"{model.path}: metadata {PREFIX}model is {kind!r}; {' and '.join(MODELS)} are read: put the model's "
            "tokenizer.json beside the file, and give the folder"
        )
    tokens = _list(model, "tokens", str)
    if not tokens:
        raise CheckpointError(f"{model.path}: metadata {PREFIX}tokens is missing: fetch the file again")
    types = _list(model, "token_type", int, len(tokens)) or [1] * len(tokens)
    template = model.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{model.path}: metadata tokenizer.chat_template must be a text, found {template!r}")
    return GgufVocabulary(
        model=kind,
        pre=_value(model, "pre", str) or "",
        architecture=str(model.metadata.get("general.architecture")),
        tokens=tokens,
        types=types,
        scores=_list(model, "scores", float, len(tokens)) if kind == "llama" else [],
        merges=_list(model, "merges", str) if kind == "gpt2" else [],
        special={name: i for name, key in _SPECIAL.items() if (i := _token_id(model, key, len(tokens))) is not None},
        add_bos=_value(model, "add_bos_token", bool),
        add_eos=_value(model, "add_eos_token", bool),
        add_space_prefix=_value(model, "add_space_prefix", bool) is not False,
        chat_template=template,
    )


def end_token_ids(model: GgufModel, vocab_size: int) -> tuple[int, ...]:
    """Ids of tokens that end an answer: those that are named, and control tokens that are known by their text."""
    named = [_token_id(model, name, vocab_size) for name in ("eos", "eot", "eom")]
    tokens, types = _list(model, "tokens", str), _list(model, "token_type", int)
    control = {token: i for i, (token, of) in enumerate(zip(tokens, types, strict=False)) if of == CONTROL}
    known = [i for token, i in control.items() if token in ENDS]
    if control.keys() >= HARMONY:  # there <|end|> ends a message, not the answer
        known.remove(control["<|end|>"])
    return tuple(dict.fromkeys(i for i in [*named, *known] if i is not None and i < vocab_size))


def _token_id(model: GgufModel, name: str, num_tokens: int) -> int | None:
    found = _value(model, f"{name}_token_id", int)
    if found is None or found in (-1, 0xFFFFFFFF):  # none
        return None
    if not 0 <= found < num_tokens:
        raise CheckpointError(
            f"{model.path}: metadata {PREFIX}{name}_token_id must be below {num_tokens}, found {found}: fetch it again"
        )
    return found


def _value(model: GgufModel, name: str, kind: type) -> Any:
    found = model.metadata.get(PREFIX + name)
    if found is not None and type(found) is not kind:
        raise CheckpointError(
            f"{model.path}: metadata {PREFIX}{name} must be of type {kind.__name__}, found {type(found).__name__}"
        )
    return found


def _list(model: GgufModel, name: str, kind: type, length: int | None = None) -> list[Any]:
    """A list of values of a type, as many as there are tokens; absent: an empty one."""
    found: Any = model.metadata.get(PREFIX + name)
    if found is None:
        return []
    values = cast("list[Any]", found)
    if not isinstance(found, list) or (values and type(values[0]) is not kind):  # a list has one type
        raise CheckpointError(f"{model.path}: metadata {PREFIX}{name} must be a list of {kind.__name__}")
    if length is not None and len(values) != length:
        raise CheckpointError(
            f"{model.path}: metadata {PREFIX}{name} must have {length} values, one a token, found {len(values)}"
        )
    return values
