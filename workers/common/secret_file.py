"""A secret in a file. Flags name the file, for other users of the machine can read a process's flags."""

from pathlib import Path

from .errors import ConfigError


def read_secret(path: Path, flag: str, what: str) -> str:
    """The file's text without surrounding space. `flag` and `what` it holds are for the error. Raises ConfigError."""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{flag}: cannot read {path} ({e}): check the path") from e
    if not secret:
        raise ConfigError(f"{flag}: {path} is empty: write the {what} into it")
    return secret
