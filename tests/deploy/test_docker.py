"""The images contain what runs, listen where the defaults require, and do not run as root."""

import re
import tomllib
from itertools import pairwise

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from diptych.cluster.common.config import RouterConfig

from .dockerfile import ROOT, Dockerfile, read, words_of

FILES = ("Dockerfile", "cuda.Dockerfile")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHON = {"cpu.lock": "3.11", "cuda.lock": "3.12"}  # of the bases


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest) -> Dockerfile:
    return read(request.param)


def locked(name: str) -> dict[str, Version]:
    """Packages of a lock and their versions. Each has a hash."""
    text = (ROOT / "deploy" / "docker" / name).read_text()
    package, hashes = r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)", r"((?: \\\n +--hash=sha256:[0-9a-f]{64})+)"
    entries = re.findall(package + hashes, text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    assert len(entries) == len(lines), "a package without a hash"
    return {package: Version(version) for package, version, _ in entries}


def test_it_breaks_no_rule(file: Dockerfile) -> None:
    assert file.faults() == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("USER 10001", "USER root"),
        ("USER 10001", "USER 0"),
        ("USER 10001\n", ""),
        ("USER 10001\n", "USER 10001\nRUN true\n"),
        ("@sha256:", "@sha256:0"),
        ("docker.io/library/debian:bookworm-slim@sha256:", "docker.io/library/debian:bookworm-slim #"),
        ("bookworm-slim@", "latest@"),
        ('ARG PIP=""', 'ARG PIP=""\nARG PYPI_TOKEN=""'),
        ("PYTHONUNBUFFERED=1", "DIPTYCH_API_KEY=0123"),
        ("HEALTHCHECK --interval=10s", "CMD --interval=10s"),
        ('ENTRYPOINT ["tini", "--", "diptych"]', "ENTRYPOINT tini -- diptych"),
        ("COPY cluster cluster", "COPY . ."),
        ("COPY cluster cluster", "ADD cluster cluster"),
        ("--require-hashes ${PIP} -r /locks/${LOCK}", "${PIP} -r /locks/${LOCK}"),
        ("--no-index .", "."),
        ("--no-cache-dir --no-deps", "--no-deps"),
        ("--no-install-recommends g++", "g++"),
        ("    && rm -rf /var/lib/apt/lists/*\n\nRUN python3", "\nRUN python3"),
        ("WORKDIR /home/diptych", "WORKDIR home"),
    ],
)
def test_a_broken_rule_is_found(old: str, new: str) -> None:
    text = read("Dockerfile").text
    assert old in text
    broken = Dockerfile(text.replace(old, new).replace(" \\\n\nRUN", "\n\nRUN"))
    assert broken.faults() != []


def test_the_images_differ_in_what_they_are_made_of_alone() -> None:
    """So that one of them, built and run (test_image.py), speaks for the other's instructions."""
    cpu, cuda = (read(name).instructions for name in FILES)
    others = [(a, b) for a, b in zip(cpu, cuda, strict=True) if a != b]
    assert [(a[0], b[0]) for a, b in others] == [("ARG", "ARG"), ("ARG", "ARG"), ("RUN", "RUN"), ("ENV", "ENV")]
    (base, lock, packages, variables) = ((a[1], b[1]) for a, b in others)
    assert base[0].startswith("BASE=") and base[1].startswith("BASE=") and lock == ("LOCK=cpu.lock", "LOCK=cuda.lock")
    assert set(packages[1].split()) - set(packages[0].split()) == {"g++", "python3-dev"}
    assert set(variables[1].split()) - set(variables[0].split()) == {"NVIDIA_DRIVER_CAPABILITIES=compute,utility"}


def test_it_copies_all_that_the_package_is_made_of_and_nothing_that_is_not_there(file: Dockerfile) -> None:
    assert not [source for source in file.copied if not (ROOT / source).exists()]
    rooms = {name.split(".")[1] for name in PROJECT["tool"]["setuptools"]["packages"] if "." in name}
    files = {"pyproject.toml", "setup.py", "__init__.py", "py.typed"}
    files |= {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    locks = {f"deploy/docker/{name}" for name in (file.arguments["LOCK"], "sbom.lock")}
    assert rooms | files | locks == file.copied


def test_the_build_context_lets_through_what_is_copied_and_no_more() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    copied = set[str]().union(*(read(name).copied for name in FILES))
    let_through = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert let_through == {re.sub(r"\w+\.lock$", "*.lock", source) for source in copied}
    left_out = [line for line in lines[1:] if not line.startswith("!")]
    assert {"**/__pycache__", "**/*.so", "examples/training"} == set(left_out)  # compiled in it, for any CPU


@pytest.mark.parametrize("name", PYTHON)
def test_a_lock_holds_all_that_is_asked_for(name: str) -> None:
    found = locked(name)
    asked = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in ("serve", "otel"):
        asked += PROJECT["project"]["optional-dependencies"][extra]
    more = (ROOT / "deploy" / "docker" / "image.in").read_text().splitlines()
    asked += [line.partition("  #")[0] for line in more if not line.startswith("#")]
    wrong = [r for r in map(Requirement, asked) if not r.specifier.contains(found[r.name], prereleases=True)]
    assert wrong == [], "make locks"


def test_the_locks_hold_the_same_torch_and_ray() -> None:
    cpu, cuda = locked("cpu.lock"), locked("cuda.lock")
    assert cpu["torch"].public == cuda["torch"].public and cpu["torch"].local == "cpu" and cuda["torch"].local is None
    assert cpu["ray"] == cuda["ray"]
    assert not [name for name in cpu if name.startswith("nvidia-")], "an image for CPUs holds CUDA's libraries"


def test_the_last_stage_holds_no_compiler_unless_triton_needs_it() -> None:
    for name, needed in zip(FILES, (False, True), strict=True):
        [install] = [rest for kind, rest in read(name).last_stage if kind == "RUN" and "apt-get" in rest]
        assert ("g++" in install.split()) == needed
        assert "g++" in read(name).all_of("RUN")[0].split()


def test_it_exposes_the_default_ports(file: Dockerfile) -> None:
    router = RouterConfig()
    assert file.all_of("EXPOSE") == [f"{router.http_port} {router.grpc_port}"]
    [check] = file.all_of("HEALTHCHECK")
    assert f"http://127.0.0.1:{router.http_port}/health" in check


def test_its_commands_parse(file: Dockerfile) -> None:
    [entry] = file.all_of("ENTRYPOINT")
    assert words_of(entry) == ["tini", "--", "diptych"]
    [check] = file.all_of("HEALTHCHECK")
    program, flag, code = words_of(check.partition("CMD ")[2])
    assert (program, flag) == ("python", "-c")
    compile(code, "HEALTHCHECK", "exec")


def test_it_runs_as_the_user_of_the_pods(file: Dockerfile) -> None:
    [user] = file.all_of("USER")
    assert any(f"--uid {user}" in text for text in file.all_of("RUN"))
    values = (ROOT / "deploy" / "kubernetes" / "chart" / "templates").rglob("*")
    assert any(f"runAsUser: {user}" in path.read_text() for path in values if path.is_file())


def test_sbom_and_kernels_are_made_before_the_last_stage(file: Dockerfile) -> None:
    kinds = [name for name, _ in file.instructions]
    last = len(kinds) - 1 - kinds[::-1].index("FROM")
    [build] = [rest for name, rest in file.instructions[:last] if "cyclonedx-py" in rest]
    steps = [step.strip() for step in build.split("&&")]
    order = ["pip install", "pip check", "library", "cyclonedx-py environment"]
    places = [next(i for i, step in enumerate(steps) if text in step) for text in order]
    assert all(a < b for a, b in pairwise(places))
