"""Builds the compiled CPU kernels beside the package. Without a C++ compiler the package installs all the same."""

import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

builder = runpy.run_path(str(Path(__file__).parent / "kernels/cpu/build.py"))


class BuildKernels(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_name(builder["LIBRARY"]))

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            builder["build"](target)
        except builder["CannotBuild"] as e:
            print(f"notice: the compiled CPU kernels are left out: {e}", file=sys.stderr)


kernels = Extension("diptych.kernels.cpu.diptych_cpu", sources=[], optional=True)
setup(ext_modules=[kernels], cmdclass={"build_ext": BuildKernels})
