"""Machine and packages: what is there, and what cannot be done for want of what is not.

    python -m benchmarks.gpu.report.facts --device cuda

Each package is imported, for one that is installed may yet not load. The GPU comes last: one that does not answer
costs no other row.
"""

import argparse
import importlib
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from .page import FAKE
from .rows import FACT, PROBLEM, put

# Module: its distribution, and what fails without it.
NEEDED = {
    "numpy": ("numpy", "everything"),
    "google.protobuf": ("protobuf", "engine, exact, handoff"),
    "pydantic": ("pydantic", "settings are not checked; marked tests of workers that serve"),
    "safetensors": ("safetensors", "engine, exact, and checkpoints"),
    "transformers": ("transformers", "exact"),
    "grpc": ("grpcio", "workers that serve: their tests"),
    "grpc_health": ("grpcio-health-checking", "workers that serve: their tests"),
    "grpc_reflection": ("grpcio-reflection", "workers that serve: their tests"),
    "blake3": ("blake3", "checksums of KV; workers that serve: their tests"),
    "psutil": ("psutil", "workers that serve: their tests"),
    "pytest": ("pytest", "tests"),
    "pytest_asyncio": ("pytest-asyncio", "tests that are coroutines"),
    "nixl": ("nixl", "hand-offs over NIXL"),
    "ray": ("ray", "clusters; nothing here needs them"),
    "triton": ("triton", "every kernel"),
    "torch": ("torch", "everything"),
}
TOOLS = {"nvidia-smi": "the driver's facts", "compute-sanitizer": "sanitize", "git": "the commit"}
OWN = {  # modules of ours that a part needs
    "diptych.workers.execution.gpu.gpu_steps": "engine, exact",
    "diptych.workers.transport.cuda_ipc": "handoff",
    "diptych.workers.handoff.sink": "workers that serve: their tests",
}


def packages() -> None:
    for module, (name, without) in NEEDED.items():
        began = time.perf_counter()
        problem = problem_of(module)
        if not problem and getattr(sys.modules[module], "IS_STAND_IN", False):
            problem = "not installed: what stands in for it (stand_ins) checks nothing"
        seconds = time.perf_counter() - began
        note = {} if not problem else {"problem": problem, "fails without it": without}
        put("packages", name=name, version=version_of(name), import_s=round(seconds, 2), **note)


def problem_of(module: str) -> str:
    """Return why a module cannot be imported; empty where it can."""
    if find_spec(module.partition(".")[0]) is None:
        return "not installed"
    try:
        importlib.import_module(module)
    except Exception as e:  # noqa: BLE001 (a package may fail in any way, and the others are asked yet)
        return f"{type(e).__name__}: {e}"
    return ""


def version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def own_modules() -> None:
    for module, without in OWN.items():
        if problem := problem_of(module):
            put(PROBLEM, what=module, problem=problem, fails=without)
        else:
            put("modules", name=module, state="imports")


def machine(device: str) -> None:
    put(FACT, name="host", value=f"{platform.platform()}, {os.cpu_count()} cores")
    put(FACT, name="Python", value=platform.python_version())
    for tool, of in TOOLS.items():
        if shutil.which(tool) is None:
            put(FACT, name=tool, value=f"not there: without it no {of}")
    if device == "fake":
        put(FACT, name="device", value=FAKE)
        return
    query = "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    put(FACT, name="nvidia-smi", value=output_of("nvidia-smi", query, "--format=csv,noheader"))


def gpu() -> None:
    import torch

    put(FACT, name="CUDA or ROCm of torch", value=torch.version.cuda or torch.version.hip)
    properties = torch.cuda.get_device_properties(0)
    put(FACT, name="device", value=f"{properties.name}, sm_{properties.major}{properties.minor}")
    put(FACT, name="multiprocessors", value=properties.multi_processor_count)
    put(FACT, name="memory", value=f"{properties.total_memory >> 20} MiB")
    began = time.perf_counter()
    total = torch.ones(8, device="cuda").sum().item()
    put(FACT, name="first sum on the device", value=f"{total:g} of 8, {time.perf_counter() - began:.2f} s")
    put(FACT, name="GPUs", value=torch.cuda.device_count())


def output_of(*argv: str) -> str:
    if shutil.which(argv[0]) is None:
        return f"{argv[0]} is not there"
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=20)
    except subprocess.TimeoutExpired:
        return f"{argv[0]} does not answer"
    return done.stdout.strip() or done.stderr.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    options = parser.parse_args()
    machine(options.device)
    packages()
    own_modules()
    if options.device == "cuda":
        gpu()
    return 0


if __name__ == "__main__":
    sys.exit(main())
