"""The image contains what runs, listens where the defaults require, and does not run as root."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from diptych.cluster.common.config import RouterConfig

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
KNOWN = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    found = [tuple(line.split(maxsplit=1)) for line in joined if line.strip()]
    return [(name, " ".join(rest.split())) for name, rest in found]


def all_of(instructions: list[tuple[str, str]], wanted: str) -> list[str]:
    return [rest for name, rest in instructions if name == wanted]


def arguments(instructions: list[tuple[str, str]]) -> dict[str, str]:
    return {k: v.strip('"') for k, v in (text.split("=", 1) for text in all_of(instructions, "ARG"))}


def test_only_instructions_that_exist(instructions: list[tuple[str, str]]) -> None:
    assert {name for name, _ in instructions} == KNOWN
    assert [name for name, _ in instructions][:2] == ["ARG", "FROM"]


def test_it_copies_all_that_the_package_is_made_of_and_nothing_that_is_not_there(
    instructions: list[tuple[str, str]],
) -> None:
    copied = {source for text in all_of(instructions, "COPY") for source in text.split()[:-1]}
    assert not [source for source in copied if not (ROOT / source).exists()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]
    rooms = {name.split(".")[1] for name in packages if "." in name}
    files = {"pyproject.toml", "setup.py", "__init__.py", "py.typed"}
    files |= {project["project"]["readme"], *project["project"]["license-files"]}
    assert rooms | files == copied


def test_the_build_context_lets_through_what_is_copied(instructions: list[tuple[str, str]]) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    copied = {source for text in all_of(instructions, "COPY") for source in text.split()[:-1]}
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied


def test_it_installs_what_the_package_asks_for(instructions: list[tuple[str, str]]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {r.name: r for r in map(Requirement, project["project"]["optional-dependencies"]["serve"])}
    for name in ("TORCH", "RAY"):
        pinned = Requirement(arguments(instructions)[name])
        [version] = [s.version for s in pinned.specifier]
        assert needed[pinned.name].specifier.contains(version)
    assert all_of(instructions, "RUN")[-1].endswith('".[serve]"')


def test_its_compiler_builds_the_kernels_of_the_cpu(instructions: list[tuple[str, str]]) -> None:
    """Without setup.py and a C++ compiler the package installs, and torch computes."""
    commands = all_of(instructions, "RUN")
    assert "g++" in commands[0].split() and "pip install" in commands[-1]


def test_its_python_is_one_that_the_package_runs_on(instructions: list[tuple[str, str]]) -> None:
    base = re.fullmatch(r"python:3\.(\d+)-slim", arguments(instructions)["BASE"])
    assert base
    assert int(base[1]) >= 11


def test_it_exposes_the_default_ports(instructions: list[tuple[str, str]]) -> None:
    router = RouterConfig()
    assert all_of(instructions, "EXPOSE") == [f"{router.http_port} {router.grpc_port}"]
    [check] = all_of(instructions, "HEALTHCHECK")
    assert f"http://127.0.0.1:{router.http_port}/health" in check


def test_its_commands_parse(instructions: list[tuple[str, str]]) -> None:
    for name in ("ENTRYPOINT", "CMD"):
        assert all(isinstance(word, str) for word in json.loads(all_of(instructions, name)[0]))
    [check] = all_of(instructions, "HEALTHCHECK")
    words = json.loads(check.partition("CMD ")[2])
    compile(words[-1], "HEALTHCHECK", "exec")
    for text in all_of(instructions, "RUN"):
        assert shlex.split(text)


def test_it_runs_as_nobody_in_particular(instructions: list[tuple[str, str]]) -> None:
    names = [name for name, _ in instructions]
    [user] = all_of(instructions, "USER")
    assert user.isdecimal()
    assert int(user) > 0
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))
    assert any(f"--uid {user}" in text for text in all_of(instructions, "RUN"))
