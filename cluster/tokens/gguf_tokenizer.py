"""Makes a `tokenizer.json` of the vocabulary in a GGUF file's metadata. See tokenizer_conversion.py.

    gpt2    byte-level BPE by merges; `pre` names the regular expression that cuts texts first
    llama   sentencepiece's BPE: of two neighbours, those whose token has the best score are merged first

Regular expressions are those of the tokenizers that llama.cpp names so (src/llama-vocab.cpp), as their tokenizer.json
has them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

VOCABULARY_FILE = "gguf_vocabulary.json"
CONVERSION = 1  # counts changes of this file's results: kept ones are made anew
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+%s|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*%s"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
GPT2 = "gpt-2"  # the expression that the library's byte-level pre-tokenizer has
DIGITS = "digits"  # each by itself, then as GPT2
_EXPRESSIONS = {
    "llama-bpe": _WORDS % "{1,3}",
    "qwen2": _WORDS % "",
    "tekken": _CASED % ("", "") + r"|\p{N}" + _CASED_REST,
    "gpt-4o": _CASED % (_ENDINGS + "?", _ENDINGS + "?") + r"|\p{N}{1,3}" + _CASED_REST,
}
_SAME = {
    "llama-bpe": "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe chatglm-bpe glm4",
    "qwen2": "qwen2 stablelm2 deepseek-r1-qwen kormo megrez hunyuan grok-2",
    "tekken": "tekken",
    "gpt-4o": "gpt-4o llama4",
    GPT2: "gpt-2 phi-2 olmo mpt jais exaone4 trillion gigachat mellum a.x-4.0",
    DIGITS: "smollm starcoder refact command-r codeshell exaone minerva-7b",
}
PRE_TOKENIZERS = {name: of for of, names in _SAME.items() for name in names.split()}
# Tokenizers that begin texts with bos where a file does not say, and take whole words before they merge.
_LLAMA3 = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
_NFC = {"qwen2", "deepseek-r1-qwen"}  # normalise texts first
# Files from before there was `pre`, by architecture.
_OLDER = {"qwen2": "qwen2", "llama": "llama-bpe"}


def convert_vocabulary(source: Path, target: Path) -> None:
    """source: file with a GgufVocabulary (workers/models/gguf/gguf_tokens.py) as JSON; target: folder to make. Raises
    ValueError for a vocabulary that contradicts itself, and what the library raises."""
    given = json.loads(source.read_text(encoding="utf-8"))
    tokenizer = make_tokenizer(given)
    target.mkdir()
    tokenizer.save(str(target / "tokenizer.json"))
    config = {f"{name}_token": given["tokens"][i] for name, i in given["special"].items()}
    if given["chat_template"] is not None:
        config["chat_template"] = given["chat_template"]
    (target / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def make_tokenizer(given: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Raises ValueError."""
    ids = {token: i for i, token in enumerate(given["tokens"])}
    if len(ids) != len(given["tokens"]):
        raise ValueError("tokenizer.ggml.tokens has a token twice")
    made = _by_merges(given, ids) if given["model"] == "gpt2" else _by_scores(given, ids)
    kinds = dict(zip(given["tokens"], given["types"], strict=True))
    own = [token for token, kind in kinds.items() if kind == USER_DEFINED]
    made.add_tokens([AddedToken(token, normalized=False) for token in own])
    special = [token for token, kind in kinds.items() if kind == CONTROL]
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    _surround(made, given)
    return made


def _by_merges(given: Mapping[str, Any], ids: dict[str, int]) -> tokenizers.Tokenizer:
    pre = _pre_name(given)
    merges = [tuple(merge.split(" ")) for merge in given["merges"]]
    if not merges or any(len(pair) != 2 for pair in merges):
        raise ValueError("tokenizer.ggml.merges must have two tokens, with a space between them, in each merge")
    model = models.BPE(vocab=ids, merges=merges, ignore_merges=pre in _LLAMA3)
    made = tokenizers.Tokenizer(model)
    kind = PRE_TOKENIZERS[pre]
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind in (GPT2, DIGITS))
    before: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if kind == DIGITS else []
    if kind in _EXPRESSIONS:
        before = [pre_tokenizers.Split(Regex(_EXPRESSIONS[kind]), "isolated")]
    made.pre_tokenizer = pre_tokenizers.Sequence([*before, whole])
    if pre in _NFC:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    return made


def _pre_name(given: Mapping[str, Any]) -> str:
    name = given["pre"] or "default"
    name = _OLDER.get(given["architecture"], name) if name == "default" else name
    if name not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre is {name!r}, which is not among {', '.join(PRE_TOKENIZERS)}")
    return name


def _by_scores(given: Mapping[str, Any], ids: dict[str, int]) -> tokenizers.Tokenizer:
    if not given["scores"]:
        raise ValueError("tokenizer.ggml.scores is missing")
    unknown = given["special"].get("unk")
    model = models.BPE(
        vocab=ids,
        merges=_merges_of(given, ids),
        unk_token=None if unknown is None else given["tokens"][unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    made = tokenizers.Tokenizer(model)
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    decode: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if given["add_space_prefix"]:
        spaces.insert(0, normalizers.Prepend("▁"))
        decode.append(decoders.Strip(" ", 1, 0))
    made.normalizer, made.decoder = normalizers.Sequence(spaces), decoders.Sequence(decode)
    return made


def _merges_of(given: Mapping[str, Any], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens that together are a token, by its score, best first; pairs of one token by their ids."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(given["tokens"], given["types"], given["scores"], strict=True):
        if kind != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found, key=lambda merge: merge[:3])]


def _surround(made: tokenizers.Tokenizer, given: Mapping[str, Any]) -> None:
    """Add bos and eos to texts, as the file says or as its kind of tokenizer does."""
    begins = given["model"] == "llama" or _pre_name(given) in _LLAMA3
    begins = begins if given["add_bos"] is None else given["add_bos"]
    around = {name: given["tokens"][i] for name, i in given["special"].items() if name in ("bos", "eos")}
    before = [around["bos"]] if begins and "bos" in around else []
    after = [around["eos"]] if given["add_eos"] and "eos" in around else []
    if before or after:
        ids = [(token, made.token_to_id(token)) for token in dict.fromkeys([*before, *after])]
        first = [*before, "$A", *after]
        pair = [*first, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
        made.post_processor = processors.TemplateProcessing(single=first, pair=pair, special_tokens=ids)
