"""Kernels that have been compiled but have not run on a GPU: they are used only where the environment says so.

DIPTYCH_UNTRIED_KERNELS names them, with commas between; "all" are all of them. `benchmarks.gpu.gpu_report` runs them
beside those that they would replace. One that has run, gives what it should and is faster loses its name here.
"""

import os

VARIABLE = "DIPTYCH_UNTRIED_KERNELS"
KERNELS = {
    "dependent-launch": "kernels of decodes start while the one before ends",
    "hopper-prompts": "attention of prompts on sm_90, in Gluon",
    "hopper-latents": "latent attention of decodes on sm_90, in Gluon",
    "hopper-experts": "products of experts on sm_90, in Gluon",
    "symmetric-sums": "sums over a worker's GPUs in memory that each of them maps of all others",
    "overlapped-halves": "large steps of workers that share experts in halves: one is computed, the other exchanged",
}
ALL = "all"


def is_wanted(kernel: str) -> bool:
    """kernel: one of KERNELS. Raises ValueError where the environment names another."""
    assert kernel in KERNELS
    return kernel in wanted()


def wanted() -> list[str]:
    """Return those of KERNELS that the environment names. Raises ValueError."""
    names = [name for each in os.environ.get(VARIABLE, "").split(",") if (name := each.strip())]
    if unknown := [name for name in names if name not in (*KERNELS, ALL)]:
        raise ValueError(f"{VARIABLE} names {', '.join(unknown)}: there are {', '.join(KERNELS)}, and {ALL}")
    return [name for name in KERNELS if name in names or ALL in names]
