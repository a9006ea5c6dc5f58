"""Builds the compiled CPU kernels beside the package. Without a C++ compiler the package installs all the same.

A library that stands beside the sources already, and was built from them, is taken as it is: `python
kernels/cpu/build.py` builds it anew.
"""

import ctypes
import runpy
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNELS = Path(__file__).resolve().parent / "kernels/cpu"
builder = runpy.run_path(str(KERNELS / "build.py"))
built = KERNELS / builder["LIBRARY"]


def is_current(library: Path) -> bool:
    """Whether it is there, for this kind of machine, of the sources that are here."""
    try:
        sources = ctypes.CDLL(str(library)).diptych_sources
    except (OSError, AttributeError):
        return False
    sources.restype = ctypes.c_char_p
    return sources().decode() == builder["fingerprint"]()


class BuildKernels(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_name(builder["LIBRARY"]))

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if not is_current(built):
                builder["build"](target)
            elif target != built:
                shutil.copyfile(built, target)
        except builder["CannotBuild"] as e:
            print(f"notice: the compiled CPU kernels are left out: {e}", file=sys.stderr)


class AnyPythonsWheel(bdist_wheel):
    """Wheel of one platform for every version of Python: ctypes loads the kernels, which know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


kernels = Extension("diptych.kernels.cpu.diptych_cpu", sources=[], optional=True)
# Named, or the package, whose folder is this one, would hold this file.
commands = {"build_ext": BuildKernels, "bdist_wheel": AnyPythonsWheel}
setup(script_name="setup.py", ext_modules=[kernels], cmdclass=commands)
