"""The oldest protobuf and grpcio that pyproject.toml allows load the generated modules, and serve with them."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("protobuf", "grpcio", "grpcio-health-checking", "grpcio-reflection")
SERVING = (
    "tests/workers/common/test_wire.py",
    "tests/workers/server/test_service.py::test_hand_off_between_two_workers",
)
OLDER_GRPC = "grpcio==1.70.0"  # of which no health service goes with such a protobuf; but a machine may have it
LOADING = (
    "import grpc; from diptych.proto import inference_pb2_grpc, kv_pb2_grpc, worker_pb2_grpc; print(grpc.__version__)"
)


def oldest() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    limits = dict(re.fullmatch(r"([\w-]+)>=([\w.]+)(?:;.*)?", each).groups() for each in found)  # pyright: ignore
    return [f"{name}=={limits[name]}" for name in PACKAGES]


def run(*arguments: str, beside: Path) -> str:
    """Run Python with the packages of a folder before those that are installed."""
    environment = os.environ | {"PYTHONPATH": str(beside), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_workers_serve_with_the_oldest_versions(tmp_path: Path) -> None:
    own, older = tmp_path / "oldest", tmp_path / "older"
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target")
    run(*install, str(own), *oldest(), beside=own)
    assert " passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", *SERVING, beside=own)
    run(*install, str(older), oldest()[0], OLDER_GRPC, beside=older)
    assert run("-c", LOADING, beside=older).strip() == OLDER_GRPC.partition("==")[2]
