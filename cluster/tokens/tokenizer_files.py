"""Finds the files of a checkpoint that hold its tokenizer. Does not read them.

`tokenizer.json` is used as it is. Without it, one of these is converted to it (tokenizer_conversion.py):

    tokenizer.model                  sentencepiece, or tiktoken under that name
    vocab.json and merges.txt        byte-level BPE
    tiktoken.model, *.tiktoken       tiktoken
    *.gguf                           metadata of a GGUF model: the file that has it is the first
"""

from pathlib import Path

from ...workers.common.errors import CheckpointError
from ...workers.models.gguf.gguf_files import gguf_paths

TOKENIZER_FILE = "tokenizer.json"
MODEL_FILE = "tokenizer.model"
BPE_FILES = ("vocab.json", "merges.txt")
TIKTOKEN_FILE = "tiktoken.model"
# Other files that transformers reads: class of the tokenizer, special tokens.
SETTINGS_FILES = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def find_sources(folder: Path) -> tuple[Path, ...]:
    """Files to convert; none where there is a tokenizer.json. Raises CheckpointError where there is nothing to read or
    convert. folder: or a GGUF file."""
    if (folder / TOKENIZER_FILE).is_file():
        return ()
    if gguf := gguf_paths(folder):
        return gguf[:1]
    if (path := folder / MODEL_FILE).is_file():
        return (path,)
    if all((folder / name).is_file() for name in BPE_FILES):
        return tuple(folder / name for name in BPE_FILES)
    tiktoken = sorted(p for p in (folder / TIKTOKEN_FILE, *folder.glob("*.tiktoken")) if p.is_file())
    if len(tiktoken) > 1:
        names = ", ".join(p.name for p in tiktoken)
        raise CheckpointError(f"{folder} holds several tiktoken files ({names}): keep the one of this model")
    if tiktoken:
        return (tiktoken[0],)
    missing = [name for name in BPE_FILES if not (folder / name).is_file()]
    beside = f" ({BPE_FILES[0]} and {BPE_FILES[1]} go together, {missing[0]} is missing)" if len(missing) == 1 else ""
    raise CheckpointError(
        f"{folder} holds no tokenizer: neither {TOKENIZER_FILE} nor {MODEL_FILE}, {' and '.join(BPE_FILES)}, or a "
        f"tiktoken file{beside}. Fetch the tokenizer's files from where the checkpoint came from"
    )
