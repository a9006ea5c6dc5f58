"""Compiles every kernel for an H100, needing none: prints its name and the size of the machine code."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from diptych.kernels import paged_attention, rms_norm, rope_kv_write, silu_mul

CONSTANTS = {
    rms_norm._rms_norm_kernel: {"HAS_RESIDUAL": True, "BLOCK": 4096},
    silu_mul._silu_mul_kernel: {"BLOCK": 1024},
    rope_kv_write._rope_kv_write_kernel: {"BLOCK": 64},
    paged_attention._paged_attention_kernel: {
        "GROUP": 4,
        "DIM": 128,
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "BLOCK_D": 128,
    },
}
POINTERS = {"cos_sin": "*fp32", "slots": "*i64", "block_tables": "*i32", "context_lens": "*i32", "query_starts": "*i32"}
TENSORS = {"x", "residual", "weight", "out", "gate_up", "q", "k", "v", "cache"}


def argument_type(name: str) -> str:
    if name in ("eps", "scale"):
        return "fp32"
    return POINTERS.get(name) or ("*bf16" if name in TENSORS else "i32")


def compile_for_h100(kernel: Any, constants: dict[str, Any]) -> bytes:
    signature = {n: "constexpr" if n in constants else argument_type(n) for n in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


if __name__ == "__main__":
    for kernel, constants in CONSTANTS.items():
        print(kernel.__name__, len(compile_for_h100(kernel, constants)))
