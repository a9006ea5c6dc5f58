"""benchmarks/gpu/kernels.py: its cases, small without a GPU, and its output there."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
GROUPS = sorted(p.stem for p in (ROOT / "benchmarks" / "gpu" / "kernel_cases").glob("*.py") if p.stem != "common")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.kernels", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_gpu_it_says_so() -> None:
    done = run(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines() == ["This measures kernels on a GPU, and torch sees none here."]


def check_all(file: Path, **environment: str) -> list[dict[str, object]]:
    done = run("--check", "--json", str(file), **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["results"]
    assert sorted({row["group"] for row in rows}) == GROUPS
    assert not any(row["problem"] or row["problems"] for row in rows)
    return rows


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_small_cases_are_right_where_triton_is_interpreted(tmp_path: Path) -> None:
    """The inputs, references and peers of every case, by the same code that a GPU runs."""
    rows = check_all(tmp_path / "found.json", TRITON_INTERPRET="1")
    assert all(row["num_bytes"] > 0 and row["error"] is not None and row["seconds"] is None for row in rows)


# Of these torch asks CUDA itself, or makes tensors of classes of its own.
OF_CUDA = ("linear", "prefill_attention")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_inputs_and_references_take_tensors_of_a_gpu() -> None:
    """As CUDA refuses them beside the host's, which CPU tensors alone do not show."""
    groups = [group for group in GROUPS if group not in OF_CUDA]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.gpu.marked_device", *groups],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_large_cases_are_right_on_a_gpu(tmp_path: Path) -> None:
    check_all(tmp_path / "found.json", TRITON_INTERPRET="0")
