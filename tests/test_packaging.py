"""The sdist and the wheel hold every room, the protocol files and the shipped models, and nothing else."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import diptych
from deploy.release import source
from deploy.release.contents import check_sdist, check_wheel, sdist_names, wheel_names
from deploy.release.source import LIBRARY, ROOT, CannotRelease
from diptych.cluster.preflight.extras import SERVING

from .test_house import ROOMS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILD = "import setuptools.build_meta as b, sys; folder = sys.argv[1]; b.build_sdist(folder); b.build_wheel(folder)"
# Packages that a server may lack.
OPTIONAL = {"nixl", "triton"}


@pytest.fixture(scope="module")
def dists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist and a wheel, made of what git knows and of the kernels that are built here."""
    tools, sources, built = (tmp_path_factory.mktemp(name) for name in ("tools", "sources", "built"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(tools)]
    subprocess.run([*install, *PROJECT["build-system"]["requires"]], check=True)
    source.copy(sources)
    if (ROOT / LIBRARY).exists():  # else there may be no compiler
        shutil.copy2(ROOT / LIBRARY, sources / LIBRARY)
    environment = os.environ | {"PYTHONPATH": str(tools)}
    subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=sources, env=environment, check=True)
    return built


@pytest.fixture(scope="module")
def wheel(dists: Path) -> Path:
    [found] = dists.glob("*.whl")
    return found


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = wheel_names(wheel)
    check_wheel(names, source.tracked(), source.version(), has_kernels=(ROOT / LIBRARY).exists())
    with pytest.raises(CannotRelease, match=r"lacks diptych/examples/tiny/config\.json"):
        check_wheel(names - {"diptych/examples/tiny/config.json"}, source.tracked(), source.version())
    with pytest.raises(CannotRelease, match=r"holds diptych/tests/test_packaging\.py"):
        check_wheel(names | {"diptych/tests/test_packaging.py"}, source.tracked(), source.version())


def test_the_sdist_holds_what_builds_it_and_nothing_else(dists: Path) -> None:
    [sdist] = dists.glob("*.tar.gz")
    names = sdist_names(sdist)
    check_sdist(names, source.tracked(), source.version())
    with pytest.raises(CannotRelease, match=r"lacks diptych-.*/setup\.py"):
        check_sdist({name for name in names if not name.endswith("/setup.py")}, source.tracked(), source.version())


def test_what_ships_is_every_room_and_the_models_that_are_named_as_packages() -> None:
    models = {name.removeprefix("diptych.").replace(".", "/") for name in PROJECT["tool"]["setuptools"]["packages"]}
    assert set(source.FOLDERS) == set(ROOMS) | {name for name in models if name.startswith("examples/")}


def test_one_wheel_serves_every_python_of_a_platform(wheel: Path) -> None:
    """Nothing in it is compiled for a version of Python."""
    assert wheel.name.startswith(f"diptych-{source.version()}-py3-none-")
    assert [name for name in wheel_names(wheel) if name.endswith(".so")] in ([], [f"diptych/{LIBRARY}"])
    if (ROOT / LIBRARY).exists():
        assert b"PyInit" not in (ROOT / LIBRARY).read_bytes() and not wheel.name.endswith("-any.whl")


def test_the_version_is_stated_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"diptych-{source.version()}.dist-info/METADATA").decode())
    assert metadata["Version"] == source.version() == diptych.__version__
    texts = (
        literal.value
        for literal in ast.walk(ast.parse((ROOT / "__init__.py").read_text()))
        if isinstance(literal, ast.Constant)
    )
    assert source.version() not in texts


def test_a_client_installs_neither_torch_nor_ray() -> None:
    names = {Requirement(each).name for each in PROJECT["project"]["dependencies"]}
    assert not names & (SERVING.keys() | OPTIONAL)


def test_what_a_server_needs_is_looked_for() -> None:
    """Every package of the extra is named to who lacks it."""
    extra = {Requirement(each).name for each in PROJECT["project"]["optional-dependencies"]["serve"]}
    assert extra == SERVING.keys() | OPTIONAL


def test_what_the_simplest_server_lacks_is_not_installed_with_a_client(tmp_path: Path) -> None:
    """`diptych serve` says by name what is missing, and how to install it."""
    code = (
        "import sys\n"
        f"for name in {list(SERVING.values())!r}: sys.modules[name] = None\n"
        "from diptych.cluster.cli.main import main\nmain()"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "serve", "tiny"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2, run.stderr
    assert "torch, ray, transformers" in run.stderr and "pip install 'diptych[serve]'" in run.stderr
    assert "Traceback" not in run.stderr
