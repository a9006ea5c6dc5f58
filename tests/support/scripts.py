"""The modules of benchmarks/, which is no package: loaded while its folder is where Python looks."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(*names: str) -> list[ModuleType]:
    sys.path.append(str(BENCHMARKS))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(BENCHMARKS))
