"""Choice of the compiled kernels that compute a worker's steps on a CPU, or why torch does. Run it to see the choice
for this machine."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ....kernels.cpu.library import ISA_VARIABLE, PATH, Library, StaleLibrary, Team
from ....kernels.cpu.load import library
from ...common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Choice:
    library: Library | None  # None: torch computes
    why: str  # one line


def choose(isa: str = "auto") -> Choice:
    """isa: an instruction set by its name; "auto": the best that there is; "none". Raises ConfigError."""
    if isa == "none":
        return Choice(None, "torch computes, as cpu_isa says")
    try:
        found = library()
    except StaleLibrary as e:
        raise ConfigError(f"{e}, or set {ISA_VARIABLE}=none to compute with torch") from e
    if found is None and PATH.is_file():
        return Choice(None, f"torch computes, as {ISA_VARIABLE} says")
    if found is None:
        why = "the compiled CPU kernels were not built"
        if isa != "auto":
            raise ConfigError(
                f"cpu_isa {isa} is not available: {why}; install a C++ compiler, and then install Diptych again"
            )
        return Choice(None, f"torch computes, slower: {why}; install a C++ compiler and then Diptych, again")
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted and wanted not in found.isas:
        raise ConfigError(f"{ISA_VARIABLE} must be none or one that this processor has ({', '.join(found.isas)})")
    if isa not in ("auto", *found.isas):
        raise ConfigError(f"cpu_isa must be auto, none or one that this processor has ({', '.join(found.isas)})")
    chosen = found if isa == "auto" else found.using(isa)
    return Choice(chosen, f"compiled kernels compute, for {chosen.isa} (here: {', '.join(found.isas)})")


def make_team(library: Library, num_threads: int, cores: Sequence[int] | None) -> Team:
    """Each of its threads on a core of its own, where `cores` are as many."""
    return Team(library, num_threads, cores[:num_threads] if cores and len(cores) >= num_threads else None)


if __name__ == "__main__":
    print(choose().why)
