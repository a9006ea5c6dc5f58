"""Compiles the kernels for GPUs, needing none: prints warps, registers, shared memory and spills as a table.

    python ahead_of_time.py            the launches that the test compiles
    python ahead_of_time.py --all      all of them
    python ahead_of_time.py NAME...    those of the named files of triton_cases/, all

Each wrapper is called with tensors of no memory, for a driver that launches nothing: so what is compiled is what would
be launched, with the configurations tuned for the target's device. Exit status 1: something does not compile, needs
more shared memory than the chip has, spills more than its Launch allows, or does not wait for the kernel before it.
"""

import argparse
import ast
import importlib
import io
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from diptych.kernels.common import tuning

ROOT = Path(__file__).parent.parent.parent
CASES = Path(__file__).parent / "triton_cases"
DEVICES = {  # per target: the compiler's target, and the device whose tuned configurations are launched
    "sm_80": (GPUTarget("cuda", 80, 32), "a100"),
    "sm_89": (GPUTarget("cuda", 89, 32), "l40s"),  # of small shared memory
    "sm_90": (GPUTarget("cuda", 90, 32), "h200"),
    "sm_100": (GPUTarget("cuda", 100, 32), "b200"),
    "gfx942": (GPUTarget("hip", "gfx942", 64), "mi300x"),
}
MAIN_TARGETS = ("sm_90", "gfx942")  # of every launch in the gate
ATTENTION = ("decode_attention", "prefill_attention")  # compiled for the other targets too: each file's first launch
READ_CONSTANTS = ("_rms_norm_kernel",)  # before they wait for the kernel before: the norm's weight


@dataclass(frozen=True)
class Row:
    kernel: str
    launch: str
    target: str
    registers: int = 0
    shared_bytes: int = 0
    spilled_bytes: int = 0
    num_warps: int = 0
    problem: str = ""


class NoDevice:
    """A driver whose device is described and not there."""

    def __init__(self, target: GPUTarget, index: int) -> None:
        self._target, self._index = target, index

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._index  # each target is a device with a separate cache of kernels

    def get_current_stream(self, _: int) -> int:
        return 0


def case_names() -> list[str]:
    return sorted(p.stem for p in CASES.glob("*.py") if p.stem not in ("common", "conftest"))


def launches_of(case: str) -> list[Any]:
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"tests.kernels.triton_cases.{case}").LAUNCHES


def compile_each(job: tuple[str, int, str], found: Callable[[str, Any, str], None]) -> None:
    """job: (case, index of its launch, target). found: told of each kernel that is launched: its name, what Triton has
    compiled, and ptxas's log, empty if this process has compiled it before. Raises what compiling raises."""
    case, index, target = job
    gpu, device = DEVICES[target]
    os.environ[tuning.DEVICE_VARIABLE] = device
    tuning.chip_of.cache_clear()
    triton.runtime.driver.set_active(NoDevice(gpu, list(DEVICES).index(target)))
    triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        log = io.StringIO()
        with redirect_stdout(log):
            compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        found(self.__name__, compiled, log.getvalue())

    JITFunction.run = compile_only
    try:
        launches_of(case)[index].call()
    finally:
        JITFunction.run = run


def compile_launch(job: tuple[str, int, str]) -> list[Row]:
    """One row for each kernel that is launched, or one with the error. job: as compile_each has it."""
    case, index, target = job
    launch = launches_of(case)[index]
    rows: list[Row] = []

    def add(kernel: str, compiled: Any, log: str) -> None:
        used = used_on_amd(compiled) if target == "gfx942" else used_on_nvidia(log)
        if used is not None:
            shared, num_warps = compiled.metadata.shared, compiled.metadata.num_warps
            problem = excess(shared, used[1], tuning.CHIPS[DEVICES[target][1]], launch.spilled_bytes)
            problem = problem or unordered(compiled)
            rows.append(Row(kernel, launch.name, target, used[0], shared, used[1], num_warps, problem))

    try:
        compile_each(job, add)
    except Exception as error:
        problem = "\n".join(f"{type(e).__name__}: {e}" for e in (error, error.__cause__) if e is not None)
        return [*rows, Row(case, launch.name, target, problem=problem)]
    return rows


def used_on_nvidia(log: str) -> tuple[int, int] | None:
    """(registers of a thread, bytes that it spills), by ptxas; None if this process has compiled it before."""
    registers = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    return (int(registers[1]), int(spilled[1])) if registers and spilled else None


def used_on_amd(compiled: Any) -> tuple[int, int]:
    """The same, by the metadata of the assembly, which counts registers of four bytes."""
    found = {
        key: int(value)
        for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", compiled.asm["amdgcn"])
    }
    return found["vgpr_count"], 4 * found["vgpr_spill_count"]


def excess(shared_bytes: int, spilled_bytes: int, chip: tuning.Chip, allowed_spill: int) -> str:
    if shared_bytes > chip.shared_bytes:
        return f"{shared_bytes} bytes of shared memory, the chip has {chip.shared_bytes}"
    return f"spills {spilled_bytes} bytes, {allowed_spill} are allowed" if spilled_bytes > allowed_spill else ""


def unordered(compiled: Any) -> str:
    """What is wrong with the order of a kernel and the one before it, see kernels/common/dependent_launch.py."""
    before, wait, _ = compiled.asm.get("ptx", "").partition("griddepcontrol.wait")
    if bool(wait) != getattr(compiled.metadata, "launch_pdl", False):
        return "waits for the kernel before" if wait else "starts before the kernel before has ended, and does not wait"
    if wait and re.search(r"\b(st|red|atom)\.global", before):
        return "writes before it waits"
    reads = wait and re.search(r"\b(ld\.global|cp\.async\.c[ag])", before)
    return "reads before it waits" if reads and compiled.metadata.name not in READ_CONSTANTS else ""


def kernels_of_the_room() -> set[str]:
    """Names of launched kernels: the functions of kernels/ whose docstring begins with their grid."""
    functions = (
        node
        for path in (ROOT / "kernels").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    )
    return {f.name for f in functions if (ast.get_docstring(f) or "").startswith("Grid")}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    every = options.all or bool(options.names)
    jobs = [
        (case, i, target)
        for case in options.names or case_names()
        for i, launch in enumerate(launches_of(case))
        if every or launch.is_gated
        for target in launch.targets
        if every or (target in launch.gated_targets and (target in MAIN_TARGETS or (i == 0 and case in ATTENTION)))
    ]
    processes = min(len(os.sched_getaffinity(0)), 4)
    context = multiprocessing.get_context("fork")  # they have imported torch and the cases
    with ProcessPoolExecutor(processes, context) as pool:
        rows = [row for rows in pool.map(compile_launch, jobs) for row in rows]
    print("| kernel | launch | target | warps | registers | shared memory, bytes | spilled, bytes |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        used = f"{r.num_warps} | {r.registers} | {r.shared_bytes} | {r.spilled_bytes}"
        print(f"| {r.kernel} | {r.launch} | {r.target} | {used} |")
    problems = [f"{r.kernel} ({r.launch}) for {r.target}: {r.problem}" for r in rows if r.problem]
    if not options.names:
        missing = kernels_of_the_room() - {r.kernel for r in rows}
        problems += [f"{name}: no launch of it is compiled" for name in sorted(missing)]
    print("", *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
