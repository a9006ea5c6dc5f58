"""benchmarks/kernels.py where there is no GPU."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/kernels.py", *arguments],
        cwd=ROOT,
        env={"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 1 and "torch sees none here" in done.stderr and not done.stdout


def test_every_file_of_cases_can_be_imported() -> None:
    names = [p.stem for p in (ROOT / "benchmarks" / "kernel_cases").glob("*.py")]
    imports = "\n".join(f"import kernel_cases.{name}" for name in names)
    done = subprocess.run([sys.executable, "-c", imports], cwd=ROOT / "benchmarks", check=False)
    assert names and done.returncode == 0
