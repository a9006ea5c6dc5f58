"""Programmatic dependent launch: a kernel starts while the one before it ends, and prefetches what no kernel writes.

    one kernel       start ─ previous_done ─ read, compute, write ─ end
    the next                       start ─ (prefetch) ─ previous_done ───────────── read, compute, write ─ end

The rule, by which every order is safe: **each program of such a kernel calls `previous_done` before it reads what any
kernel has written, and before it writes.** It returns once the kernel before has ended and its writes are seen; that
one has waited for the one before it, and so on. Before the call a program may touch constants alone (weights), and ask
for anything to be in the second cache, which reads nothing. When a kernel lets the next one start has no consequence
for what is computed.

It has not run on a GPU: kernels are launched so only where the environment asks for it (untried.py). Otherwise PDL is
False, and of these functions no instruction is left.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .lang import jit, tl
from .tuning import chip_of
from .untried import is_wanted

_KINDS = ("sm_90", "sm_100")  # where the hardware has it, and graphs capture it


@cache
def is_asked() -> bool:
    """Return whether the environment asks for it, read once. Raises ValueError."""
    return is_wanted("dependent-launch")


def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Parameters of a launch on `device` of a kernel that keeps the rule; PDL is a constant of the kernel's own."""
    if is_asked() and any(kind in _KINDS for kind in chip_of(device).kinds):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@jit
def previous_done(PDL: tl.constexpr):
    """Wait until the kernel before has ended. Not within a loop: Triton would move loads before it."""
    if PDL:
        tl.extra.cuda.gdc_wait()  # pyright: ignore[reportAttributeAccessIssue]


@jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel start, once every program has called this or ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]


@jit
def follow_previous(PDL: tl.constexpr):
    """Both, in the order for short kernels: the next one starts, and prefetches, while this one waits."""
    let_next_start(PDL)
    previous_done(PDL)


@jit
def prefetch_rows(rows: tl.tensor, NUM_BYTES: tl.constexpr, PIECES: tl.constexpr, NUM_ROWS: tl.constexpr):
    """Ask for the first NUM_BYTES at each of [NUM_ROWS] pointers to be in the second cache, PIECES requests a row.
    Addresses, and NUM_BYTES // PIECES, are multiples of 16."""
    SIZE: tl.constexpr = NUM_BYTES // PIECES
    piece = tl.arange(0, PIECES)[None, :]
    at = rows.to(tl.int64, bitcast=True)[:, None] + piece * SIZE
    at = tl.reshape(at, (NUM_ROWS * PIECES,))
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [at, tl.full((NUM_ROWS * PIECES,), SIZE, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def prefetch_lines(at: tl.tensor):
    """Ask for the lines of 128 bytes at these pointers, which are valid, to be in the second cache. A kernel may be
    writing them: nothing is read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
