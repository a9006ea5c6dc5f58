"""Parts of a report and the jobs of each, in the order of what is worth most. Knows no torch.

discover    machine and packages; one launch of every kernel, small, each in a process of its own
sanitize    the same launches under compute-sanitizer; only where it is asked for
engine      engine_gpu.py: a process for each model, with graphs and without; and with kernels that were not tried
exact       logits and tokens against transformers'; of two families also with those kernels
handoff     KV from one process to another by CUDA IPC
kernels     kernels.py: times, shares of the limits, goals; beside peers that need not be compiled
peers       the peers that need to be (torch.compile), in the time that the parts before have left
tests       those marked `gpu`; each kernel's cases, compiled for this GPU, against its twin; large cases
"""

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from .jobs import SECONDS, Job

ROOT = Path(__file__).parents[3]
PARTS = ("discover", "sanitize", "engine", "exact", "handoff", "kernels", "peers", "tests")
ON_REQUEST = ("sanitize",)
# Shares of the whole time. A part may take, beside its own, what those before it have left.
SHARES = {
    "discover": 0.15,
    "sanitize": 0.20,
    "engine": 0.35,
    "exact": 0.10,
    "handoff": 0.06,
    "kernels": 0.20,
    "peers": 0.0,
    "tests": 0.14,
}
SERVING = ("grpc_health", "grpc_reflection", "blake3", "psutil", "pydantic")  # imported by workers that serve
TESTED = ("compressed_tensors", "llguidance", "loguru")  # imported by tests of the engine on a GPU, beside those
APART = (  # tests whose work is done here by itself
    "tests/kernels/test_triton.py",
    "tests/benchmarks/test_kernels.py",
)
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default")  # warnings are of the libraries found here
# Groups of kernel_cases/, those first whose figures decide most.
BY_VALUE = (
    "decode_attention",
    "prefill_attention",
    "linear",
    "decode_layer",
    "scaled_gemm",
    "moe",
    "mla",
    "logits",
    "weight_only_gemm",
    "kivi",
    "rows",
)
COMPILED_PEERS = ("rows", "logits")
FEW_BITS = {  # of 8b, and flags
    "int4": ("--quantize", "int4"),
    "fp8-rows": ("--quantize", "fp8-rows"),
    "mxfp4": ("--quantize", "mxfp4"),
    "KV int8": ("--kv-dtype", "int8"),
    "KV int4": ("--kv-dtype", "int4"),
    "KV kivi": ("--kv-dtype", "kivi"),
}
MODELS = ("8b", "v2-lite", "1b")
UNTRIED = {"DIPTYCH_UNTRIED_KERNELS": "all"}  # see kernels/common/untried.py
WITH_UNTRIED = ("8b", "v2-lite")  # models
EXACT_WITH_UNTRIED = ("llama", "deepseek-v3")  # families
FAMILIES = ("llama", "qwen3", "gptoss", "deepseek-v3", "gemma3")
IS_SMALL = {"KERNEL_CASES": "small"}  # see kernel_cases/common.py
ON_FAKE = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Setup:
    """Circumstances of a report."""

    is_fake: bool = False  # a fake device: shapes are tiny, kernels are interpreted
    at_once: int = 1
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def device(self) -> str:
        return "fake" if self.is_fake else "cuda"


Planned = tuple[list[Job], int]  # the jobs of a part, and how many of them run at a time


def plan(part: str, setup: Setup) -> Planned | str:
    """Return a part's jobs, or why there are none."""
    return _PLANS[part](setup)


def ends(parts: Sequence[str]) -> dict[str, float]:
    """Shares of the whole time by whose end each of these parts is over."""
    whole, sum_, found = sum(SHARES[part] for part in parts) or 1.0, 0.0, dict[str, float]()
    for part in parts:
        sum_ += SHARES[part]
        found[part] = sum_ / whole
    return found


def _python(name: str, *argv: str, weight: float = 1.0, limit_s: float = 3600.0, **environment: str) -> Job:
    return Job(name, (sys.executable, *argv), environment, weight, limit_s)


def discover(setup: Setup) -> Planned:
    machine = _python("machine", "-m", "benchmarks.gpu.report.facts", "--device", setup.device, limit_s=120)
    at_once = ("--at-once", str(max(min(os.cpu_count() or 2, 16), 2)), "--seconds", SECONDS)
    launches = _python("launches", "-m", "benchmarks.gpu.report.launches", *at_once, **IS_SMALL, **_on(setup))
    return [machine, launches], 2


def sanitize(setup: Setup) -> Planned | str:
    if (tool := shutil.which("compute-sanitizer")) is None:
        return "skipped: compute-sanitizer is not there"
    if setup.is_fake:
        return "skipped: compute-sanitizer checks real GPUs alone"
    prefix = (tool, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all", sys.executable)
    tiny = "import torch; print(torch.ones(8, device='cuda').sum().item())"  # where the tool itself does not work here
    check = ("-m", "benchmarks.gpu.kernels", "--check", "--peers", "none", "--seconds", SECONDS, "--only")
    jobs = [Job("the tool itself, on torch", (*prefix, "-c", tiny), limit_s=60)]
    return jobs + [Job(f"memcheck: {name}", (*prefix, *check, name), IS_SMALL) for name in groups()], 1


def engine(setup: Setup) -> Planned:
    jobs: list[Job] = []
    for model in ("tiny",) if setup.is_fake else MODELS:
        for graphs in ("yes", "no"):
            name, what = f"{model}, {'graphs' if graphs == 'yes' else 'eager'}", ("--models", model, "--graphs", graphs)
            argv = ("-m", "benchmarks.gpu.engine_gpu", "--device", setup.device, *what, "--seconds", SECONDS)
            jobs.append(_python(name, *argv, weight=3.0 if model == "8b" else 1.0, **_threads(setup)))
    shape = "tiny" if setup.is_fake else "8b"
    others = {name: (*FEW_BITS[name], "--parts", "decode", "prefill") for name in FEW_BITS}
    if setup.is_fake:
        others = {"int4": others["int4"]}
    for name, flags in (others | {"speculation": ("--parts", "speculation")}).items():
        what = ("--models", shape, "--graphs", "yes", *flags)
        argv = ("-m", "benchmarks.gpu.engine_gpu", "--device", setup.device, *what, "--seconds", SECONDS)
        jobs.append(_python(f"{shape}, {name}", *argv, **_threads(setup)))
    for model in () if setup.is_fake else WITH_UNTRIED:  # beside the same parts without
        what = ("--models", model, "--graphs", "yes", "--parts", "decode", "prefill", "--seconds", SECONDS)
        jobs.append(_python(f"{model}, untried kernels", "-m", "benchmarks.gpu.engine_gpu", *what, **UNTRIED))
    return jobs, 1


def exact(setup: Setup) -> Planned | str:
    if lacking := missing(("transformers", "safetensors")):
        return f"skipped: without {', '.join(lacking)} there is nothing to compare with"
    argv = ("-m", "benchmarks.gpu.report.exact", "--device", setup.device, "--family")
    families = ("llama", "deepseek-v3") if setup.is_fake else FAMILIES
    jobs = [_python(f"exact: {name}", *argv, name, **_threads(setup)) for name in families]
    if not setup.is_fake:
        jobs += [_python(f"exact: {name}, untried kernels", *argv, name, **UNTRIED) for name in EXACT_WITH_UNTRIED]
    return jobs, max(min(setup.at_once, 3), 2)


def handoff(setup: Setup) -> Planned:
    argv = ("-m", "benchmarks.gpu.report.handoff", "--device", setup.device)
    return [_python("CUDA IPC", *argv, limit_s=90, **_threads(setup))], 1


def kernels(setup: Setup) -> Planned:
    argv = ("-m", "benchmarks.gpu.kernels", "--seconds", SECONDS)
    if setup.is_fake:
        rest = ("--check", "--only", "rows", "weight_only_gemm")
        return [_python("kernels: rows", *argv, *rest, **IS_SMALL, **_on(setup))], 1
    names = [name for name in BY_VALUE if name in groups()] + [name for name in groups() if name not in BY_VALUE]
    return [_python(f"kernels: {name}", *argv, "--peers", "quick", "--only", name) for name in names], 1


def peers(setup: Setup) -> Planned | str:
    if setup.is_fake:
        return "skipped: there is nothing to compile for"
    argv = ("-m", "benchmarks.gpu.kernels", "--peers", "slow", "--seconds", SECONDS, "--only")
    return [_python(f"peers: {name}", *argv, name) for name in COMPILED_PEERS], 1


def tests(setup: Setup) -> Planned | str:
    if setup.is_fake:
        argv = (*PYTEST, "tests/benchmarks/test_kernel_bench.py")  # not the report's own
        return [_python("tests: kernel_bench", *argv, **_threads(setup))], 1
    has_pytest = find_spec("pytest") is not None
    return test_jobs(has_pytest=has_pytest), setup.at_once


_PLANS: dict[str, Callable[[Setup], Planned | str]] = {
    "discover": discover,
    "sanitize": sanitize,
    "engine": engine,
    "exact": exact,
    "handoff": handoff,
    "kernels": kernels,
    "peers": peers,
    "tests": tests,
}


def groups() -> list[str]:
    return sorted(p.stem for p in (ROOT / "benchmarks" / "gpu" / "kernel_cases").glob("*.py") if p.stem != "common")


def test_jobs(*, has_pytest: bool) -> list[Job]:
    """Make the jobs: tests marked `gpu` first, for nothing else runs what they do; of kernels' cases the longest."""
    on_gpu = {"TRITON_INTERPRET": "0"}
    cases = sorted((ROOT / "tests" / "kernels" / "triton_cases").glob("*.py"), key=lambda p: -p.stat().st_size)
    jobs: list[Job] = []
    if has_pytest:
        jobs += [_python(f"marked: {file}", *PYTEST, "-m", "gpu", file) for file in marked_files()]
        jobs += [
            _python(f"cases: {path.stem}", *PYTEST, str(path.relative_to(ROOT)), **on_gpu)
            for path in cases
            if path.stem not in ("common", "conftest")
        ]
    check = ("-m", "benchmarks.gpu.kernels", "--check", "--peers", "none", "--only")
    return jobs + [_python(f"large: {group}", *check, group, **on_gpu) for group in groups()]


def marked_files() -> list[str]:
    """Files with tests that are marked `gpu`: no others are imported, for they may need what is not installed."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [str(path.relative_to(ROOT)) for path in paths if "pytest.mark.gpu" in path.read_text()]
    return [file for file in found if file not in APART and not (file.startswith("tests/e2e") and not_served())]


def not_served() -> list[str]:
    """Return the packages that workers need to serve and that are not installed."""
    return missing(SERVING)


def missing(packages: Sequence[str]) -> list[str]:
    return [name for name in packages if find_spec(name) is None]


def importable(folder: Path) -> dict[str, str]:
    """The environment in which `diptych` can be imported: where it is not installed, by a link to it in `folder`. And
    where pydantic is not installed, with what stands in for it (stand_ins/pydantic)."""
    added: list[str] = []
    if find_spec("diptych") is None:
        (folder / "diptych").symlink_to(ROOT, target_is_directory=True)
        added.append(str(folder))
    if find_spec("pydantic") is None:
        added.append(str(Path(__file__).parent / "stand_ins"))
    if not added:
        return {}
    return {"PYTHONPATH": os.pathsep.join([*added, *filter(None, [os.environ.get("PYTHONPATH")])])}


def _on(setup: Setup) -> dict[str, str]:
    return ON_FAKE if setup.is_fake else {"TRITON_INTERPRET": "0"}


def _threads(setup: Setup) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1"} if setup.is_fake else {}
