"""Makes a `tokenizer.json` for checkpoints without one: transformers converts it once, and the result is cached.

files found -> key of their content -> in the cache? else converted by a process of its own -> moved into the cache

transformers takes seconds to import and reads files from strangers. So it runs in a process with a time limit that ends
with this one, on copies of the tokenizer's files only (without any code of the checkpoint). A GGUF file's vocabulary is
converted there, too, without transformers (gguf_tokenizer.py). The cache is DIPTYCH_HOME/tokenizers, else
XDG_CACHE_HOME/diptych/tokenizers: one folder for each tokenizer, named after the checkpoint and the content of its
files. Where it cannot be written, nothing is cached.
"""

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from ...workers.common.errors import CheckpointError, ConfigError
from ...workers.models.gguf.gguf_files import gguf_paths, read_gguf
from ...workers.models.gguf.gguf_tokens import read_vocabulary
from .gguf_tokenizer import CONVERSION, VOCABULARY_FILE
from .tokenizer_files import SETTINGS_FILES, TIKTOKEN_FILE, TOKENIZER_FILE, find_sources

LIMIT_S = 600.0
CONVERTERS = ("transformers", "tokenizers", "sentencepiece", "tiktoken")  # versions may convert differently
_REMEDY = (
    "convert it where transformers can read it (AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)) and put "
    f"the {TOKENIZER_FILE} into the checkpoint's folder"
)
_REMEDY_OF_GGUF = f"put the model's own {TOKENIZER_FILE} into a folder with the file, and serve the folder"

log = logging.getLogger("diptych.tokenizer")


def needs_conversion(folder: Path) -> bool:
    """Return whether the tokenizer of the checkpoint in `folder` has to be converted. Raises CheckpointError."""
    sources = find_sources(folder)
    return bool(sources) and not (_cache() / _name(folder, sources) / TOKENIZER_FILE).is_file()


@contextmanager
def tokenizer_folder(folder: Path, *, limit_s: float = LIMIT_S) -> Generator[Path]:
    """Folder with the tokenizer.json of the checkpoint in `folder`: itself, or one in the cache, after a conversion if
    needed. Raises CheckpointError, ConfigError."""
    sources = find_sources(folder)
    if not sources:
        yield folder
        return
    name = _name(folder, sources)
    with _writable(_cache()) as root:
        try:
            kept = _kept(folder, sources, root / name, limit_s)
        except OSError as e:
            raise ConfigError(
                f"cannot store the converted tokenizer in {root}: {e.strerror}. Free space, or set DIPTYCH_HOME"
            ) from e
        yield kept


def _kept(folder: Path, sources: Sequence[Path], kept: Path, limit_s: float) -> Path:
    with _alone(
        kept.with_name(f"{kept.name}.lock")
    ):  # routers of a machine start together: one converts, the others wait
        if not (kept / TOKENIZER_FILE).is_file():
            _convert(folder, sources, kept, limit_s)
    return kept


def _convert(folder: Path, sources: Sequence[Path], kept: Path, limit_s: float) -> None:
    with tempfile.TemporaryDirectory(prefix="part-", dir=kept.parent) as temporary:
        stage, out = Path(temporary, "in"), Path(temporary, "out")
        stage.mkdir()
        for name, content in _contents(folder, sources).items():
            # transformers finds a tiktoken file by this name only.
            (stage / (TIKTOKEN_FILE if name.endswith(".tiktoken") else name)).write_bytes(content)
        _run(stage, out, sources, limit_s)
        shutil.rmtree(kept, ignore_errors=True)
        out.rename(kept)
    log.info("converted the tokenizer of %s, kept in %s", folder, kept)


def _run(stage: Path, out: Path, sources: Sequence[Path], limit_s: float) -> None:
    """Run the conversion process. Raises CheckpointError with its error."""
    what, remedy = " and ".join(map(str, sources)), _REMEDY_OF_GGUF if gguf_paths(sources[0]) else _REMEDY
    said = stage.parent / "stderr"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    module = "diptych.cluster.tokens.convert_tokenizer"
    with said.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(stage), str(out)],
            stdin=subprocess.PIPE,  # the process ends when this closes
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment,
        )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"{what} was not converted to {TOKENIZER_FILE} in {limit_s:g} s: {remedy}") from None
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
    if code:
        lines = said.read_text(errors="replace").strip().splitlines()
        why = f"signal {-code}" if code < 0 else lines[-1] if lines else f"exit code {code}"
        raise CheckpointError(f"{what} cannot be converted to {TOKENIZER_FILE} ({why}): {remedy}")


def _name(folder: Path, sources: Sequence[Path]) -> str:
    digest = blake2b(digest_size=12)
    for package in CONVERTERS:
        digest.update(f"{package} {version(package)}\n".encode())
    for name, content in _contents(folder, sources).items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return f"{folder.name}-{digest.hexdigest()}"


def _contents(folder: Path, sources: Sequence[Path]) -> dict[str, bytes]:
    """Content of the files to convert, and of settings beside them, by name; of a GGUF file, its vocabulary. Raises
    CheckpointError."""
    if (model := read_gguf(sources[0])) is not None:
        return {VOCABULARY_FILE: json.dumps(read_vocabulary(model).to_json() | {"conversion": CONVERSION}).encode()}
    found: dict[str, bytes] = {}
    for path in (*sources, *(each for name in SETTINGS_FILES if (each := folder / name).is_file())):
        try:
            found[path.name] = path.read_bytes()
        except OSError as e:
            raise CheckpointError(f"cannot read {path}: {e.strerror}. Check the file's permissions") from e
    return found


def _cache() -> Path:
    if home := os.environ.get("DIPTYCH_HOME"):
        return Path(home) / "tokenizers"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diptych" / "tokenizers"


@contextmanager
def _writable(root: Path) -> Generator[Path]:
    """`root`, or a temporary folder where it cannot be written."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = "" if os.access(root, os.W_OK) else "it cannot be written"
    except OSError as e:
        why = e.strerror
    if not why:
        yield root
        return
    log.warning("a converted tokenizer cannot be kept in %s (%s): each start converts it. Set DIPTYCH_HOME", root, why)
    with tempfile.TemporaryDirectory(prefix="diptych-tokenizer-") as temporary:
        yield Path(temporary)


@contextmanager
def _alone(lock: Path) -> Generator[None]:
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
