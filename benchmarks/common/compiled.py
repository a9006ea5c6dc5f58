"""Setup of benchmarks of the compiled kernels. Imported, not run."""

from collections.abc import Sequence

import torch

from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.load import library


def compiled_team(num_threads: int, cores: Sequence[int] | None = None, isa: str | None = None) -> Team:
    """Threads for the compiled kernels, bound to the first of `cores`, and as many for torch; torch is seeded. isa: the
    best of this machine where None. Ends the program where nothing is built."""
    kernels = library()
    if kernels is None:
        raise SystemExit("error: the compiled kernels are not built: python kernels/cpu/build.py")
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    return Team(kernels.using(isa) if isa else kernels, num_threads, cores[:num_threads] if cores else None)
