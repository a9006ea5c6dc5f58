"""Builds the compiled CPU kernels: `python kernels/cpu/build.py`, or the package's own build, which calls `build`.

One shared library holds every kernel once for each instruction set; which of them runs is chosen when it is loaded.
Standard library only: it runs before anything is installed.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
ONCE = ("ranks.cpp", "structs.cpp", "team.cpp")  # the rest is built for each instruction set
LIBRARY = "diptych_cpu.so"
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wall")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
ISAS: dict[str, tuple[str, ...]] = {
    "portable": ("-Wno-psabi",),
    "avx2": (*AVX2, "-Wno-psabi"),
    "avx512": AVX512,
    "avx512bf16": (*AVX512, "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni"),
}


class CannotBuild(Exception):
    """Why there are no compiled kernels; Diptych computes with torch then."""


class NoCompiler(CannotBuild):
    """No fault of the sources."""


def find_compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise NoCompiler("no C++ compiler was found: install g++ or clang++, or set CXX, and install Diptych again")


def knows_tiles(compiler: str) -> bool:
    """Return whether the compiler's assembler knows the matrix unit (AMX), as binutils 2.35 and LLVM 11 do."""
    flags = ("-mamx-tile",) if "clang" in Path(compiler).resolve().name else ()
    command = [compiler, *flags, "-x", "c++", "-", "-c", "-o", os.devnull]
    code = 'void f() { asm volatile("tilerelease"); }'
    return subprocess.run(command, input=code, capture_output=True, text=True, check=False).returncode == 0


def fingerprint() -> str:
    """Digest of the sources and of how they are built: a library says which it was made from."""
    digest = hashlib.blake2b(digest_size=8)
    for path in (HERE / "build.py", *sorted(SOURCES.iterdir())):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build(target: Path) -> None:
    """Compile into `target`. Raises CannotBuild."""
    compiler = find_compiler()
    isas = ISAS if platform.machine() in ("x86_64", "AMD64") else {"portable": ()}
    flags_of_all = FLAGS if knows_tiles(compiler) else (*FLAGS, "-DDIPTYCH_NO_TILES")
    sources = fingerprint()
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            [
                compiler,
                *flags_of_all,
                *flags,
                f"-DDIPTYCH_ISA={isa}",
                f'-DDIPTYCH_SOURCES="{sources}"',
                "-c",
                str(source),
                "-o",
                f"{folder}/{source.stem}.{isa}.o",
            ]
            for source in sorted(SOURCES.glob("*.cpp"))
            for isa, flags in ({"portable": ISAS["portable"]} if source.name in ONCE else isas).items()
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        # Into place in one step: a process may have the old one mapped.
        fresh = target.with_suffix(".new")
        _run([compiler, "-shared", "-pthread", "-o", str(fresh), *(command[-1] for command in commands)])
        fresh.replace(target)


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as e:
        raise CannotBuild(f"{command[0]} could not be run ({e})") from e
    except subprocess.CalledProcessError as e:
        raise CannotBuild(f"{' '.join(command)} failed:\n{e.stderr.strip()}") from e


if __name__ == "__main__":
    try:
        build(HERE / LIBRARY)
    except NoCompiler as e:
        print(f"notice: the compiled CPU kernels are left out: {e}", file=sys.stderr)
    except CannotBuild as e:
        sys.exit(f"error: {e}\n(a compiler that is too old: name a newer one in CXX)")
