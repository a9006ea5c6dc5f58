"""Check that two checkpoints have one vocabulary: routers keep the tokenizer that they have read."""

from pathlib import Path

from ...workers.common.errors import CheckpointError, ConfigError
from ..tokens.tokenizer import Tokenizer
from ..tokens.tokenizer_files import find_sources


def check_tokenizers(before: Path, after: Path) -> None:
    """Compare the tokenizers of two checkpoints, folders or GGUF files. One that is no tokenizer.json is converted, as
    routers convert it. Raises ConfigError where a token has another number, or where they are not here to compare."""
    if before.absolute() == after.absolute():
        return
    old, new = _vocabulary(before, before, after), _vocabulary(after, before, after)
    differing = sorted(text for text in old.keys() | new.keys() if old.get(text) != new.get(text))
    if differing:
        text = differing[0]
        example = f"the first is {text!r}: {new.get(text)}, there {old.get(text)}"
        raise ConfigError(
            f"the tokenizer of {after} differs from that of {before} in {len(differing)} tokens ({example}): workers "
            "of another vocabulary cannot take the place of these. Start a cluster of its own for that model"
        )


def _vocabulary(path: Path, before: Path, after: Path) -> dict[str, int]:
    try:
        find_sources(path)
    except CheckpointError as e:
        raise ConfigError(
            f"no tokenizers of {before} and {after} are here to compare: run this on a machine where both are ({e})"
        ) from e
    return Tokenizer.load(path).vocabulary
