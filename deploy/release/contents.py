"""Contents of an sdist and of a wheel: what they must hold, and nothing else."""

import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from .source import LIBRARY, SDIST_FILES, CannotRelease, shipped

DIST_INFO = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
MADE_IN_SDIST = ("PKG-INFO", "setup.cfg")
EGG_INFO = "diptych.egg-info/"


def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def sdist_names(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {member.name for member in archive if member.isfile()}


def check_wheel(names: set[str], tracked: Iterable[str], version: str, *, has_kernels: bool = True) -> None:
    """`names`: of a wheel's files. Raises CannotRelease where they are not those of the package."""
    wanted = {f"diptych/{name}" for name in shipped(tracked)}
    wanted |= {f"diptych-{version}.dist-info/{name}" for name in DIST_INFO}
    if has_kernels:
        wanted.add(f"diptych/{LIBRARY}")
    _check("the wheel", names, wanted)


def check_sdist(names: set[str], tracked: Iterable[str], version: str) -> None:
    """`names`: of an sdist's files. Raises CannotRelease where they are not those of the package and what builds it."""
    top = f"diptych-{version}/"
    wanted = {top + name for name in (*shipped(tracked), *SDIST_FILES, *MADE_IN_SDIST)}
    _check("the sdist", {name for name in names if not name.startswith(top + EGG_INFO)}, wanted)


def _check(what: str, names: set[str], wanted: set[str]) -> None:
    problems = [f"lacks {name}" for name in sorted(wanted - names)] + [f"holds {n}" for n in sorted(names - wanted)]
    if problems:
        raise CannotRelease(
            f"{what} {', '.join(problems)}: packages and their data are listed in pyproject.toml, files beside them in "
            "MANIFEST.in, and both in deploy/release/source.py"
        )
