"""Builds a release and checks it: `make release`, or `python -m deploy.release.release`. Uploads nothing.

the version has its heading in CHANGELOG.md -> sdist -> wheel with compiled kernels -> both installed and used
"""

import argparse
import subprocess
import sys
from pathlib import Path

from .build import build, glibc_of
from .check import check
from .source import ROOT, CannotRelease


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.release.release", description="Build a release, and check it."
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the sdist and the wheel")
    parser.add_argument("--torch", default="torch", help="which torch the check installs, as pip is asked for it")
    given = parser.parse_args()
    try:
        sdist, wheel = build(given.out)
        for file in (sdist, wheel):
            print(f"{file} ({file.stat().st_size / 1e6:.1f} MB)", flush=True)
        print(f"for glibc {'.'.join(map(str, glibc_of(wheel.name)))} and later, x86-64", flush=True)
        check(sdist.absolute(), wheel.absolute(), given.torch)
    except CannotRelease as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as e:
        print(f"error: `{' '.join(map(str, e.cmd))}` failed with exit code {e.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
