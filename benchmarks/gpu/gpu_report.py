"""All that a GPU can tell in ten minutes, as one report.

    python -m benchmarks.gpu.gpu_report [--seconds 560] [--out DIR]

    tests      those marked `gpu`; each kernel's cases, compiled for this GPU, against its twin; the cases of
               benchmarks/gpu/kernels.py, large, against their references: side by side, which also fills the compilers'
               caches for what follows
    kernels    benchmarks/gpu/kernels.py: times, shares of the limits, goals
    engine     benchmarks/gpu/engine_gpu.py

Whatever fails or takes too long, the others still run; time that a step leaves goes to the next. report.md, report.json
and log.txt (all output) are written anew after each step. Needs torch, triton, transformers, grpcio, protobuf,
safetensors and numpy, and pytest for the tests; diptych need not be installed. Exit status 1: something
failed, or a goal is missed.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from .kernel_bench.commands import Command, Outcome, run, run_all
from .kernel_bench.report import Step, kernel_body, markdown

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "triton", "transformers", "grpcio", "safetensors", "numpy", "protobuf", "pytest", "psutil")
# Shares of the whole time by whose end a step is over.
TESTS_END, KERNELS_END = 0.40, 0.75
SERVING = ("grpc_health", "grpc_reflection", "blake3", "psutil")  # imported by workers that serve
LONGEST_FIGURE_S = 40  # engine_gpu.py looks at its time between figures
APART = ("tests/kernels/test_triton.py", "tests/benchmarks/test_kernels.py")  # what they run is run here by itself
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default")  # warnings are of the libraries found here


def facts() -> dict[str, str]:
    """Return the facts of the machine and the software that the figures belong to."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    found = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "device": f"{properties.name}, {properties.multi_processor_count} cores, {properties.total_memory >> 20} MiB",
        "driver": driver(),
        "CUDA or ROCm of torch": str(torch.version.cuda or torch.version.hip),
        "host": f"{platform.platform()}, {os.cpu_count()} cores",
        "Python": platform.python_version(),
        "commit": output_of("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "command": " ".join(sys.argv),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def driver() -> str:
    query = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    return output_of("nvidia-smi", query, "--format=csv,noheader")


def output_of(*argv: str) -> str:
    if shutil.which(argv[0]) is None:
        return f"{argv[0]} is not there"
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=20)
    except subprocess.TimeoutExpired:
        return f"{argv[0]} does not answer"
    return done.stdout.strip() or done.stderr.strip()


def test_commands(environment: Mapping[str, str], has_pytest: bool) -> list[Command]:
    """Longest first, as far as it is known: those of the kernels that are compiled in most ways."""
    on_gpu = {**environment, "TRITON_INTERPRET": "0"}
    cases = sorted((ROOT / "tests" / "kernels" / "triton_cases").glob("*.py"), key=lambda p: -p.stat().st_size)
    groups = sorted(p.stem for p in (ROOT / "benchmarks" / "gpu" / "kernel_cases").glob("*.py") if p.stem != "common")
    commands = [
        Command(f"large: {group}", (sys.executable, "-m", "benchmarks.gpu.kernels", "--check", "--only", group), on_gpu)
        for group in groups
    ]
    if has_pytest:
        commands += [
            Command(f"marked: {file}", (sys.executable, *PYTEST, "-m", "gpu", file), environment)
            for file in marked_files()
        ]
        commands += [
            Command(f"cases: {path.stem}", (sys.executable, *PYTEST, str(path.relative_to(ROOT))), on_gpu)
            for path in cases
            if path.stem not in ("common", "conftest")
        ]
    return commands


def marked_files() -> list[str]:
    """Files with tests that are marked `gpu`: no others are imported, for they may need what is not installed."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [str(path.relative_to(ROOT)) for path in paths if "pytest.mark.gpu" in path.read_text()]
    return [file for file in found if file not in APART and not (file.startswith("tests/e2e") and not_served())]


def not_served() -> list[str]:
    """Return the packages that workers need to serve and that are not installed."""
    return [name for name in SERVING if find_spec(name) is None]


def tests(step: Step, deadline: float, environment: Mapping[str, str], at_once: int) -> None:
    has_pytest = find_spec("pytest") is not None
    if not has_pytest:
        step.outcomes.append(Outcome("pytest", "not run: it is not installed"))
    if missing := not_served():
        step.outcomes.append(Outcome("marked: tests/e2e", f"not run: without {', '.join(missing)}"))
    step.outcomes += run_all(test_commands(environment, has_pytest), deadline, ROOT, at_once)


def kernels(step: Step, deadline: float, environment: Mapping[str, str], out: Path) -> None:
    """The script ends by itself before the deadline, and then has written what it found."""
    file = out / "kernels.json"
    file.unlink(missing_ok=True)
    limit = max(deadline - time.monotonic() - 10, 1)
    argv = (sys.executable, "-m", "benchmarks.gpu.kernels", "--seconds", f"{limit:.0f}", "--json", str(file))
    outcome = run(Command("kernels", argv, environment), deadline, ROOT)
    step.outcomes.append(outcome)
    found = json.loads(file.read_text()) if file.exists() else None
    step.body = kernel_body(found, outcome.output.splitlines() if found else [])


def engine(step: Step, deadline: float, environment: Mapping[str, str], out: Path) -> None:
    step.shows_output = True
    seconds = max(deadline - time.monotonic() - LONGEST_FIGURE_S, 1)
    argv = (
        sys.executable,
        "-m",
        "benchmarks.gpu.engine_gpu",
        "--seconds",
        f"{seconds:.0f}",
        "--json",
        str(out / "engine.json"),
    )
    step.outcomes.append(run(Command("engine_gpu.py", argv, environment), deadline, ROOT))


def write(out: Path, found: Mapping[str, str], steps: Sequence[Step]) -> None:
    (out / "report.md").write_text(markdown(found, steps))
    read = {p.stem: json.loads(p.read_text()) for p in (out / "kernels.json", out / "engine.json") if p.exists()}
    told = [{**asdict(step), "status": step.status} for step in steps]
    (out / "report.json").write_text(json.dumps({"facts": dict(found), "steps": told, **read}, indent=1))
    logs = (f"===== {o.name}: {o.status}\n{o.command}\n{o.output}\n" for step in steps for o in step.outcomes)
    (out / "log.txt").write_text("".join(logs))


def importable(folder: Path) -> dict[str, str]:
    """The environment in which `diptych` can be imported: where it is not installed, by a link to it in `folder`."""
    if find_spec("diptych") is not None:
        return {}
    (folder / "diptych").symlink_to(ROOT, target_is_directory=True)
    return {"PYTHONPATH": os.pathsep.join(p for p in (str(folder), os.environ.get("PYTHONPATH")) if p)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=560.0, help="in all")
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="a folder")
    parser.add_argument("--at-once", type=int, default=min(8, max((os.cpu_count() or 2) // 2, 1)), help="tests")
    return parser.parse_args()


def main() -> int:
    start = time.monotonic()
    options = arguments()
    import torch

    if not torch.cuda.is_available():
        print("This measures a GPU, and torch sees none here.", file=sys.stderr)
        return 1
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    found = facts()
    steps = [Step("tests"), Step("kernels"), Step("engine")]
    with tempfile.TemporaryDirectory() as folder:
        environment = importable(Path(folder))
        work: list[Callable[[Step, float], None]] = [
            lambda step, deadline: tests(step, deadline, environment, options.at_once),
            lambda step, deadline: kernels(step, deadline, environment, out),
            lambda step, deadline: engine(step, deadline, environment, out),
        ]
        for step, do, end in zip(steps, work, (TESTS_END, KERNELS_END, 1.0), strict=True):
            begun = time.monotonic()
            do(step, start + end * options.seconds)
            step.seconds = time.monotonic() - begun
            print(f"{step.name}: {step.status}, {step.seconds:.0f} s", flush=True)
            write(out, found, steps)
    print(f"written: {out / 'report.md'}")
    return 0 if all(o.has_passed for step in steps for o in step.outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
