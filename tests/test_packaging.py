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
from deploy.release.build import check_glibc
from deploy.release.contents import check_sdist, check_wheel, sdist_names, wheel_names
from deploy.release.source import LIBRARY, ROOT, CannotRelease, check_changelog
from diptych.workers.config.extras import SERVING

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


def run_as_a_client(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python where nothing of what only a server needs can be imported."""
    without = f"import sys\nfor name in {[*SERVING.values(), *OPTIONAL]!r}: sys.modules[name] = None\n"
    command = [sys.executable, "-c", without + code, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


COMMAND = "from diptych.cluster.cli.main import main\nmain()"
IMPORTED = (
    "diptych.cluster.batch.run",
    "diptych.cluster.bench.bench",
    "diptych.cluster.planning.search",
    "diptych.cluster.preflight.doctor",
    "diptych.cluster.simulate.profile",
    "diptych.cluster.simulate.simulation",
)


def test_clients_import_nothing_that_only_a_server_needs(tmp_path: Path) -> None:
    code = f"from diptych import AsyncClient, Client\nimport {', '.join(IMPORTED)}"
    run = run_as_a_client(code, folder=tmp_path)
    assert run.returncode == 0, run.stderr


def test_a_plan_needs_no_server(tmp_path: Path) -> None:
    run = run_as_a_client(COMMAND, "plan", "tiny", folder=tmp_path)
    assert run.returncode == 0 and "fits" in run.stdout, run.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("serve", "tiny"), "torch, ray, transformers"),
        (("quantize", "tiny", "--format", "int4", "--out", "out"), "torch and safetensors"),
    ],
)
def test_a_command_of_a_server_says_what_a_client_lacks(arguments: tuple[str, ...], named: str, tmp_path: Path) -> None:
    run = run_as_a_client(COMMAND, *arguments, folder=tmp_path)
    assert run.returncode == 2, run.stderr
    assert named in run.stderr and "pip install 'diptych[serve]'" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_changelog_must_have_the_version() -> None:
    text = "# Changelog\n\n## Unreleased\n\n- b\n\n## 1.2.3 - 2026-01-02\n\n### Added\n\n- a\n\n## 1.2.0 - 2026-01-01\n"
    check_changelog(text, "1.2.3")
    for version in ("1.2.4", "1.2", "1.2.3.1", "Unreleased"):
        with pytest.raises(CannotRelease, match="has no heading"):
            check_changelog(text, version)
    with pytest.raises(CannotRelease, match="says nothing"):
        check_changelog(text, "1.2.0")
    check_changelog((ROOT / "CHANGELOG.md").read_text(), source.version())


def test_a_wheel_must_not_need_a_newer_glibc_than_torch() -> None:
    for tags in ("manylinux_2_27_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64.manylinux_2_34_x86_64"):
        check_glibc(f"diptych-0.1.0-py3-none-{tags}.whl")
    with pytest.raises(CannotRelease, match=r"needs glibc 2\.34"):
        check_glibc("diptych-0.1.0-py3-none-manylinux_2_34_x86_64.whl")
    for name in ("py3-none-linux_x86_64", "cp311-cp311-manylinux_2_28_x86_64", "py3-none-any"):
        with pytest.raises(CannotRelease, match="is not a wheel"):
            check_glibc(f"diptych-0.1.0-{name}.whl")
