"""Calibration text as sequences of token ids.

A file is plain text, or JSON lines (its name ends in .jsonl) of objects with a string `text`. Plain text is cut into
sequences of equal length; each line's text is a sequence, cut where it is longer. Of more than are wanted, those at
equal distances are taken.
"""

import json
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from ..common.errors import CheckpointError, ConfigError
from ..models.plan.quantize_job import MIN_SEQUENCE_TOKENS

TOKENIZER_FILE = "tokenizer.json"


def read_sequences(model: Path, file: Path, num: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """Return at most `num` sequences of at most `num_tokens` tokens. Raises ConfigError for a text that gives none, and
    CheckpointError for a model without a tokenizer."""
    tokenizer = _tokenizer(model)
    before = tokenizer.encode("").ids  # what the model expects at the beginning, as its post-processor adds it
    length = max(num_tokens - len(before), 1)
    texts = _texts(file)
    found: list[list[int]] = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        pieces = [ids[i : i + length] for i in range(0, len(ids), length)]
        if len(texts) > 1:
            pieces = pieces[:1]
        found += [before + piece for piece in pieces if len(before) + len(piece) >= MIN_SEQUENCE_TOKENS and piece]
    if not found:
        raise ConfigError(f"{file} has no text of at least {MIN_SEQUENCE_TOKENS} tokens: calibrate with another")
    if any(token >= vocab_size for sequence in found for token in sequence):
        raise CheckpointError(f"{model / TOKENIZER_FILE} has tokens that the model of {vocab_size} has not")
    count = min(num, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def _tokenizer(model: Path) -> Tokenizer:
    path = model / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{model} has no {TOKENIZER_FILE}, which calibration reads text by: write one with transformers "
            "(AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises plain Exceptions
        raise CheckpointError(f"{path} cannot be read ({e}): fetch it again") from e


def _texts(file: Path) -> list[str]:
    """Raises ConfigError."""
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file} cannot be read as UTF-8 text ({e}): calibrate with another") from e
    if file.suffix != ".jsonl":
        return [content]
    found: list[str] = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise ConfigError(f"{file}, line {number} is no JSON ({e})") from e
        text = cast("dict[str, Any]", record).get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ConfigError(f"{file}, line {number} must be an object with a string `text`")
        found.append(text)
    return found
