"""Sources of a release: which version they are, which files of them ship, a copy without what lies beside them."""

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY = "kernels/cpu/diptych_cpu.so"  # the compiled CPU kernels
# What the package is made of: its folders, with every file that they hold, and files of the root.
MODELS = ("tiny", "tiny_draft", "tiny_eagle3", "tiny_mtp")
FOLDERS = ("cluster", "workers", "kernels", "proto", *(f"examples/{model}" for model in MODELS))
FILES = ("__init__.py", "py.typed")
# Beside these, in an sdist: what builds and describes it.
SDIST_FILES = ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")


class CannotRelease(Exception):
    """What is wrong, and what to do about it."""


def version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def check_changelog(text: str, version: str) -> None:
    """`text`: a changelog in the format of Keep a Changelog. Raises CannotRelease where it has no heading of `version`
    with a date, or nothing below it."""
    match = re.search(
        rf"^## \[?{re.escape(version)}\]? - \d{{4}}-\d\d-\d\d$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    if match is None:
        raise CannotRelease(
            f"CHANGELOG.md has no heading `## {version} - YYYY-MM-DD`: add it above what the release contains, or "
            "correct the version in pyproject.toml"
        )
    if not re.search(r"^- ", match[1], re.MULTILINE):
        raise CannotRelease(f"CHANGELOG.md says nothing of {version}: move what is new from Unreleased to it")


def tracked() -> list[str]:
    """Files that git knows and that are there, by their paths from the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def shipped(names: Iterable[str]) -> set[str]:
    """Those of `names` that belong to the package."""
    folders = tuple(f"{folder}/" for folder in FOLDERS)
    return {name for name in names if name.startswith(folders) or name in FILES}


def copy(target: Path) -> None:
    """Copy what git knows to `target`, and nothing that was built or left there."""
    for name in tracked():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
