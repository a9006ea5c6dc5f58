"""Cores that compute: a worker that has cores of its own keeps its compute threads there. No torch.

The engine's thread, which computes with the others, has the first core, each other thread of its team one more. The
threads that serve (event loop, gRPC's, NIXL's) are kept off them where tokens are decoded: `cores_to_serve`. Where
cores are not to be had (another system than Linux, a core that this process may not use) nothing is bound.
"""

import os
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")


def usable_cores(folder: Path = CPUS) -> tuple[int, ...]:
    """Return a logical CPU of each core that this process may use: two threads of a core share its arithmetic units."""
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    found: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            siblings = (folder / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        found.setdefault(siblings, cpu)
    return tuple(found.values())


def part_of(cores: Sequence[int] | None, rank: int, size: int) -> tuple[int, ...] | None:
    """The cores of one of a worker's ranks; None where they do not go round."""
    if cores is None or len(cores) < size:
        return None
    each = len(cores) // size
    return tuple(cores[rank * each : (rank + 1) * each])


def cores_to_serve(cores: Collection[int] | None, usable: Collection[int], role: str) -> tuple[int, ...] | None:
    """Return the cores for the threads that do not compute, of a worker that computes on `cores`; None: any core.

    Left to itself the kernel wakes them on the core that computes, for a while even beside an idle one: it goes by what
    a core has done in the last tens of milliseconds. Then a step waits for them, or they, and a token, for the step. So
    a worker leaves its cores to its steps. One that only prefills, in long steps, keeps its threads on them all the
    same: elsewhere they would be in the way of its sinks' steps.
    """
    if not cores:
        return None
    if role == "prefill":
        return tuple(cores)
    return tuple(sorted(set(usable) - set(cores))) or None


def cpus_of_this_thread() -> tuple[int, ...]:
    """Cores on which this thread may run; empty where the system does not say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def openmp_settings(cores: Sequence[int] | None) -> dict[str, str]:
    """Environment that OpenMP reads once, when it is loaded: a place for each core, threads bound to them in order."""
    if not cores:
        return {}
    return {"OMP_PROC_BIND": "close", "OMP_PLACES": ",".join(f"{{{core}}}" for core in cores)}


@contextmanager
def affinity_kept() -> Generator[None]:
    """Restore the calling thread's cores at the end: OpenMP binds whichever thread happens to load it."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)


def bind_this_thread(cores: Sequence[int] | None) -> bool:
    """Keep the calling thread, and threads that it starts, on these cores. Returns whether it could be."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return False
    try:
        os.sched_setaffinity(0, cores)
    except OSError:  # a core that this process may not use
        return False
    return True
