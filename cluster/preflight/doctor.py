"""`diptych doctor`: what of this machine helps or hinders Diptych, each with a remedy. Changes nothing."""

import datetime
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import psutil

from ...workers.common.errors import ConfigError, DiptychError
from ...workers.common.tls import server_certificate_end
from ...workers.config.extras import INSTALL, missing_to_serve
from ..common.config import ClusterConfig, RouterConfig
from ..common.plurals import count
from .checks import check_port, link_tls

RDMA_DEVICES = Path("/sys/class/infiniband")
IMPORT_S = 120.0
# Module of each library that computes in place of our GPU kernels: kernels/attention/libraries/,
# kernels/mla/latent_library.py, kernels/gemm/scaled_library.py, kernels/moe/expert_library.py and
# kernels/moe/scaled_expert_library.py. cuDNN is called through torch, which knows what it was built with (_cudnn).
LIBRARIES = {
    "FlashAttention 3": "flash_attn_interface",
    "FlashAttention 3 of fa3-fwd": "fa3_fwd_interface",
    "FlashMLA": "flash_mla",
    "DeepGEMM": "deep_gemm",
    "FlashInfer": "flashinfer",
}
CUDNN_PACKAGE = "nvidia.cudnn"  # which torch's wheels for CUDA install
# Of a build for AMD torch names its MIOpen so.
CUDNN_VERSION = "import torch; print((torch.version.cuda and torch.backends.cudnn.version()) or 0)"
LEAST_MEMORY_BYTES = 2 << 30
RENEW_BEFORE = datetime.timedelta(days=30)  # the end of a certificate
# What each flag is worth to the CPU kernels, best first.
CPU_FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")


class Verdict(Enum):
    OK = "ok"
    WARNING = "warning"  # works, slower or with less
    FAILED = "failed"  # `diptych serve` will not work


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def examine(config: ClusterConfig | None = None) -> Iterator[Finding]:
    """Yield each finding as soon as it is made. `config`: of a cluster, whose certificates are examined too."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        lambda: _package("torch", "torch", Verdict.FAILED, INSTALL),
        lambda: _package("ray", "ray", Verdict.FAILED, INSTALL),
        lambda: _package("nixl", "nixl._api", Verdict.WARNING, f"{INSTALL}; until then KV travels over gRPC"),
        _serving,
        _rdma,
        _compiler,
        _cpu,
        _kernels,
        _memory,
        _huge_pages,
        _gpu,
        library_finding,
        lambda: _port("HTTP port", RouterConfig().http_port),
        lambda: _port("gRPC port", RouterConfig().grpc_port),
    )
    for check in checks:
        yield check()
    if config is not None:
        yield from certificates(config)


def certificates(config: ClusterConfig) -> Iterator[Finding]:
    """Yield what is found of each certificate that the cluster would use."""
    name = "TLS between processes"
    if config.tls in ("off", "auto"):
        how = "connections are plain" if config.tls == "off" else "each start makes an authority and a certificate"
        yield Finding(name, Verdict.OK, f"{config.tls}: {how}")
    else:
        try:
            link = link_tls(config)
            assert link is not None
            yield _until(name, link.load().valid_until)
        except ConfigError as e:
            yield Finding(name, Verdict.FAILED, e.message)
    for key, tls in (("router.http_tls", config.router.http_tls), ("router.grpc_tls", config.router.grpc_tls)):
        if tls is not None:
            try:
                yield _until(key, server_certificate_end(key, Path(tls.cert), Path(tls.key)))
            except ConfigError as e:
                yield Finding(key, Verdict.FAILED, e.message)


def _until(name: str, end: datetime.datetime) -> Finding:
    is_near = end - datetime.datetime.now(datetime.UTC) < RENEW_BEFORE
    detail = f"the certificate is valid until {end:%Y-%m-%d %H:%M} UTC"
    remedy = "renew it: a replaced file is read again without a restart" if is_near else ""
    return Finding(name, Verdict.WARNING if is_near else Verdict.OK, detail, remedy)


def _rdma() -> Finding:
    names = sorted(path.name for path in RDMA_DEVICES.glob("*"))
    how = "KV goes over NIXL within a machine, over gRPC between machines"
    if not names:
        return Finding("RDMA", Verdict.OK, f"no device: {how}")
    return Finding("RDMA", Verdict.OK, f"{', '.join(names)}: {how}, unless trusted_rdma_fabric is set (see its risk)")


def _python() -> Finding:
    return Finding("Python", Verdict.OK, f"{platform.python_version()} at {sys.executable}")


def _package(name: str, module: str, if_missing: Verdict, remedy: str) -> Finding:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, if_missing, "not installed", remedy)
    try:
        run = _apart("-c", f"import {module}")
    except subprocess.TimeoutExpired:
        return Finding(name, if_missing, f"{found}, but its import hangs", f"reinstall it: {remedy}")
    if run.returncode:
        lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
        return Finding(name, if_missing, f"{found}, but it cannot be imported: {lines[-1]}", f"reinstall it: {remedy}")
    return Finding(name, Verdict.OK, found)


def _apart(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a separate process: torch takes a second, and NIXL may end the process that loads it. Raises
    subprocess.TimeoutExpired."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S, check=False)


def _serving() -> Finding:
    apart = ("torch", "ray")  # which have findings of their own
    if missing := [package for package in missing_to_serve() if package not in apart]:
        return Finding("packages of a server", Verdict.FAILED, f"not installed: {', '.join(missing)}", INSTALL)
    return Finding("packages of a server", Verdict.OK, "installed")


def _compiler() -> Finding:
    path = next((p for p in map(shutil.which, ("cc", "gcc", "clang")) if p), None)
    if path is None:
        return Finding(
            "C compiler", Verdict.WARNING, "none found", "install gcc or clang: CPU kernels are built with it"
        )
    return Finding("C compiler", Verdict.OK, path)


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flags = _cpu_flags()
    have = [flag for flag in CPU_FLAGS if flag in flags]
    text = f"{count(cores, 'core')}, {' '.join(have) or 'no vector flags known'}"
    if not have and platform.machine() == "x86_64":
        return Finding("CPU", Verdict.WARNING, text, "decoding is slow without AVX2")
    return Finding("CPU", Verdict.OK, text)


def _kernels() -> Finding:
    if missing_to_serve(("torch",)):
        return Finding("CPU kernels", Verdict.WARNING, "not looked at: they are loaded with torch", INSTALL)
    try:
        run = _apart("-m", "diptych.workers.execution.cpu.cpu_kernels")
    except subprocess.TimeoutExpired:
        return Finding("CPU kernels", Verdict.WARNING, "they do not load: it hangs", "install Diptych again")
    if run.returncode or not run.stdout:
        lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
        return Finding("CPU kernels", Verdict.WARNING, f"they do not load: {lines[-1]}", "install Diptych again")
    why, _, remedy = run.stdout.strip().partition("; ")
    return Finding("CPU kernels", Verdict.WARNING if remedy else Verdict.OK, why, remedy)


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    text = f"{free / 2**30:.1f} GiB free"
    if free < LEAST_MEMORY_BYTES:
        return Finding("memory", Verdict.WARNING, text, "free some: the model and its KV cache must fit")
    return Finding("memory", Verdict.OK, text)


def _huge_pages() -> Finding:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return Finding("huge pages", Verdict.WARNING, "unknown", "on Linux, enable transparent huge pages")
    mode = text.partition("[")[2].partition("]")[0]
    if mode in ("always", "madvise"):
        return Finding("huge pages", Verdict.OK, mode)
    remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: KV moves 3 to 5 times faster"
    return Finding("huge pages", Verdict.WARNING, mode or text.strip(), remedy)


def _gpu() -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("GPU", Verdict.OK, "none: workers compute on the CPU")
    command = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding("GPU", Verdict.WARNING, "nvidia-smi hangs", "check the driver")
    if run.returncode:
        return Finding("GPU", Verdict.WARNING, "nvidia-smi fails", "check the driver")
    return Finding("GPU", Verdict.OK, "; ".join(run.stdout.strip().splitlines()))


def library_finding() -> Finding:
    """Say which libraries compute in place of our GPU kernels."""
    found = [*_cudnn(), *(name for name, module in LIBRARIES.items() if _is_there(module))]
    if not found:
        return Finding("libraries for GPUs", Verdict.OK, "none: kernels of our own compute")
    how = "workers on GPUs that they know use what is faster than our kernels, as they measure at load"
    return Finding("libraries for GPUs", Verdict.OK, f"{', '.join(found)}: {how}")


def _cudnn() -> list[str]:
    """Return cuDNN with its version, as torch has it; nothing where it has none. Where torch does not say, what is
    installed beside it counts."""
    try:
        said = _apart("-c", CUDNN_VERSION).stdout.strip()
    except subprocess.TimeoutExpired:
        said = ""
    if not said.isdigit():
        return ["cuDNN"] if _is_there(CUDNN_PACKAGE) else []
    version_int = int(said)
    per_major = 10_000 if version_int >= 90_000 else 1000  # since version 9
    parts = version_int // per_major, version_int % per_major // 100, version_int % 100
    return [f"cuDNN {'.'.join(map(str, parts))}"] if version_int else []


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def _port(name: str, port: int) -> Finding:
    try:
        check_port("127.0.0.1", port, f"--{name.split(maxsplit=1)[0].lower()}-port")
    except DiptychError as e:
        return Finding(name, Verdict.WARNING, f"{port}", e.message)
    return Finding(name, Verdict.OK, f"{port} is free")
