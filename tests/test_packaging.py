"""The wheel holds every room, the protocol files and the shipped model, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = "kernels/cpu/diptych_cpu.so"
SUFFIXES = {".py", ".pyi", ".proto", ".json", ".safetensors", ".jinja", ".md", ".typed"}
SUFFIXES |= {".html", ".css", ".js", ".svg", ".txt"}  # of the dashboard


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(ROOT)]
    subprocess.run(command, check=True)
    [wheel] = out.glob("diptych-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_what_runs(names: set[str]) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    shipped = ("tiny", "tiny_draft", "tiny_eagle3", "tiny_mtp")
    rooms = ("cluster/", "workers/", "kernels/", "proto/", *(f"examples/{name}/" for name in shipped))
    wanted = {f"diptych/{name}" for name in tracked if name.startswith(rooms) and Path(name).suffix in SUFFIXES}
    if (ROOT / LIBRARY).exists():  # else there may be no compiler
        wanted.add(f"diptych/{LIBRARY}")
    assert wanted | {"diptych/__init__.py"} <= names


def test_the_wheel_holds_nothing_else(names: set[str]) -> None:
    assert {name.split("/")[0] for name in names} == {"diptych", "diptych-0.1.0.dist-info"}
    assert not [name for name in names if "/tests/" in name or "__pycache__" in name]
