"""CPU time of threads, from Linux's scheduler statistics: nanoseconds, where `ps` has hundredths of a second."""

from pathlib import Path


def threads_s(pid: int) -> dict[int, float]:
    """CPU seconds so far of each thread that a process has now; empty for one that is gone."""
    found: dict[int, float] = {}
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return found
    return found


def process_s(pid: int) -> float:
    return sum(threads_s(pid).values())
