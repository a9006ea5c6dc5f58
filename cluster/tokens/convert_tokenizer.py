"""Process that converts a tokenizer: `python -m diptych.cluster.tokens.convert_tokenizer FROM TO`. See
tokenizer_conversion.py. The only file that imports transformers; none imports it.

FROM is a folder with a tokenizer's files and the checkpoint's config.json, or a GGUF file's vocabulary, TO a folder to
make. An error is
reported in the last line on standard error. It ends when its standard input closes, so with its parent.
"""

import os
import sys
import threading
from pathlib import Path

from ...workers.common.garbage import importing, leave
from .gguf_tokenizer import VOCABULARY_FILE, convert_vocabulary

_PROBE = "a b"


def convert(source: Path, target: Path) -> None:
    """Raises ValueError, and what transformers raises."""
    if (source / VOCABULARY_FILE).is_file():
        convert_vocabulary(source / VOCABULARY_FILE, target)
        return
    with importing():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{type(tokenizer).__name__} has no tokenizer.json")
    # transformers may make an empty tokenizer where a file is missing.
    if not tokenizer.encode(_PROBE, add_special_tokens=False):
        raise ValueError(f"transformers converted it to an empty {type(tokenizer).__name__}")
    tokenizer.save_pretrained(target)


def main() -> int:
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    # Its import takes five times as long as all others, and no tokenizer needs it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    source, target = map(Path, sys.argv[1:])
    try:
        convert(source, target)
    except Exception as e:  # noqa: BLE001  the process's top loop; its parent reads the last line
        lines = str(e).strip().splitlines() or [""]
        print(f"{type(e).__name__}: {lines[0]}", file=sys.stderr)
        return 1
    return 0


def _end_with_the_caller() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    leave(main())
