"""Triton kernels: interpreted on CPU against their twins, compiled for a GPU that need not be there, and run on one."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
CASES = sorted(str(p) for p in (HERE / "triton_cases").glob("*.py") if p.stem not in ("common", "conftest"))
PARTS = 2  # of the files of cases: two processes interpret them side by side

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),  # other stages of the gate come first
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=HERE.parent.parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_cases(files: list[str], marked: str = "", **environment: str) -> str:
    return run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, *files, **environment)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("marked", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_interpreted_kernels_equal_their_twins(marked: str, part: int) -> None:
    assert " passed" in run_cases(CASES[part::PARTS], marked, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


def test_kernels_compile_for_every_target(tmp_path: Path) -> None:
    table = run(str(HERE / "ahead_of_time.py"), TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    print(table)
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        assert f"| _decode_attention_kernel | bf16 d 128 | {target} |" in table


@pytest.mark.long
def test_all_launches_compile_for_every_target(tmp_path: Path) -> None:
    run(str(HERE / "ahead_of_time.py"), "--all", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_kernels_on_a_gpu_equal_their_twins() -> None:
    assert " passed" in run_cases(CASES, TRITON_INTERPRET="0")
