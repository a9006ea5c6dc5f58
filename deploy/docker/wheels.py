"""Download the wheels of a lock for the machines that an image runs on, whatever Python this one has.

`python deploy/docker/wheels.py LOCK PYTHON GLIBC FOLDER`, as in `wheels.py cpu.lock 3.11 36 wheels`: pip asks whom it
is configured to ask, and checks every hash. A build that is given the folder then needs no network for Python packages.
"""

import subprocess
import sys

OLDEST_GLIBC = 5  # of a manylinux tag, as 2.5


def platforms(glibc: int) -> list[str]:
    """Tags of wheels for x86-64 Linux with glibc 2.`glibc`, the nearest first."""
    numbered = [f"manylinux_2_{minor}_x86_64" for minor in range(glibc, OLDEST_GLIBC - 1, -1)]
    return [*numbered, "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def download(lock: str, python: str, glibc: int, folder: str) -> None:
    """Raises subprocess.CalledProcessError where a package is not to be had, or is not the one that was locked."""
    tags = [word for tag in platforms(glibc) for word in ("--platform", tag)]
    asked = ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--python-version", python, *tags]
    subprocess.run([sys.executable, "-m", "pip", "download", "--dest", folder, *asked, "-r", lock], check=True)


if __name__ == "__main__":
    download(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
