"""Analyses the kernels' machine code for their speed, on a machine without a GPU: it measures nothing.

    python -m benchmarks.gpu.machine_code mla_decode prefill_attention
    python -m benchmarks.gpu.machine_code decode_attention --target sm_80 --launch "bf16 d 128" --dump folder

Compiles the launches of tests/kernels/triton_cases as tests/kernels/ahead_of_time.py does, disassembles them with
Triton's own nvdisasm, and prints for each kernel what its registers, warps and shared memory leave room for, and for
each loop the instructions that matter. One sees whether loads are 128 bits wide and asynchronous (LDGSTS, UTMALDG) or
awaited (LDG), whether products are of the wide kind (HGMMA, QGMMA) or not (HMMA), and what is spilled (LDL, STL).
"""

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORES = {"sm_80": (65536, 64, 164 * 1024), "sm_90": (65536, 64, 228 * 1024), "sm_100": (65536, 64, 228 * 1024)}
_MEMORY = ("LDG", "STG", "LDS", "STS", "LDGSTS", "LDL", "STL")
_OTHER = re.compile(r"LDSM|STSM|UBLKCP|UTMA|[HQI]G?MMA|UTC|MUFU|BAR|SHFL|FFMA|FMUL|FADD|PRMT|I2F|F2I")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P[T\d]\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)([^;]*);")


@dataclass(frozen=True)
class Loop:
    size: int  # instructions, of loops within it too
    kinds: Counter[str]  # those that are worth a look: of memory with their width in bits, of products with their shape


def loops_of(disassembled: str) -> list[Loop]:
    """disassembled: nvdisasm -c. Every backward branch closes a loop; in the order of their first instructions."""
    kinds: list[str] = []
    labels: dict[str, int] = {}
    spans: set[tuple[int, int]] = set()
    for line in disassembled.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(kinds)
        elif found := _INSTRUCTION.match(line):
            kinds.append(_kind(found[1], found[2]))
            target = re.search(r"\((\.L_\w+)\)", found[3])
            if found[1] == "BRA" and target and labels.get(target[1], len(kinds)) < len(kinds) - 1:
                spans.add((labels[target[1]], len(kinds)))
    return [Loop(end - start, Counter(kind for kind in kinds[start:end] if kind)) for start, end in sorted(spans)]


def _kind(name: str, modifiers: str) -> str:
    """Return the kind that an instruction is counted as; empty: not counted."""
    if name in _MEMORY:
        width = re.search(r"\.[US]?(8|16|64|128)\b", modifiers)
        return f"{name}.{width[1] if width else 32}"
    if not _OTHER.match(name):
        return ""
    return name + modifiers if re.match(r"[HQI]G?MMA|MUFU", name) else name


def resident(registers: int, num_warps: int, shared_bytes: int, target: str) -> int:
    """Programs that a core holds at once: a warp's registers are given out by 8 a thread, a program has 1 KiB apart."""
    all_registers, all_warps, all_shared = CORES[target]
    by_registers = all_registers // (-(-registers // 8) * 8 * 32 * num_warps)
    return min(by_registers, all_warps // num_warps, all_shared // (shared_bytes + 1024), 32)


def disassemble(cubin: bytes) -> str:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        return subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=True).stdout


def describe(kernel: str, compiled: Any, log: str, launch: str, target: str) -> str:
    """compiled, log: of ahead_of_time.compile_each. Returns the disassembled code; empty if it was shown before."""
    from tests.kernels.ahead_of_time import used_on_nvidia

    used = used_on_nvidia(log)
    if used is None:
        return ""
    (registers, spilled), warps, shared = used, compiled.metadata.num_warps, compiled.metadata.shared
    programs = resident(registers, warps, shared, target)
    print(f"\n{kernel} ({launch}): {warps} warps, {registers} registers, {spilled} bytes spilled,", end=" ")
    print(f"{shared} bytes of shared memory; {programs} programs a core")
    code = disassemble(compiled.asm["cubin"])
    for loop in loops_of(code):
        print(f"  loop of {loop.size}:", ", ".join(f"{kind} {n}" for kind, n in sorted(loop.kinds.items())))
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="files of tests/kernels/triton_cases")
    parser.add_argument("--target", choices=CORES, default="sm_90")
    parser.add_argument("--launch", default="", help="launches whose name has this in it")
    parser.add_argument("--dump", type=Path, help="a folder for the disassembled code")
    options = parser.parse_args()
    from tests.kernels import ahead_of_time

    for case in options.names:
        for index, launch in enumerate(ahead_of_time.launches_of(case)):
            if options.launch not in launch.name or options.target not in launch.targets:
                continue

            def show(kernel: str, compiled: Any, log: str, launch: str = launch.name) -> None:
                code = describe(kernel, compiled, log, launch, options.target)
                if code and options.dump:
                    options.dump.mkdir(parents=True, exist_ok=True)
                    name = re.sub(r"\W+", "_", f"{kernel}_{launch}_{options.target}")
                    (options.dump / f"{name}.sass").write_text(code)

            ahead_of_time.compile_each((case, index, options.target), show)


if __name__ == "__main__":
    main()
