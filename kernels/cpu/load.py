"""Loads the compiled CPU kernels, and checks that Python and C++ agree on the structures that they share.

A library built from other sources is refused. So is one whose structures differ from their ctypes mirrors, by a size or
a field's offset: its kernels would read other fields than Python wrote.
"""

import ctypes
import os
from functools import cache
from typing import Any

from .attention import AttentionLimits, Cache, HeadNormsStruct, Heads, Rope, Sequences, SparseStruct
from .build import fingerprint
from .experts import ExpertRows, Experts
from .greedy import BEST
from .heads import HeadStruct, PassesStruct, TallyStruct
from .layer import Attention, DecoderStruct, LayerStruct, Mixture, StepStruct, TakenStruct
from .library import ISA_VARIABLE, PATH, Library, StaleLibrary, available_isas, text_of
from .linear import Linear, WeightRows
from .routing import PackedRouting
from .sample import Draw

Fields = dict[str, tuple[int, int]]  # by name: offset and size, in bytes; the structure itself has the name ""
MIRRORS: dict[str, type[ctypes.Structure]] = {
    "WeightRows": WeightRows,
    "Linear": Linear,
    "Draw": Draw,
    "Routing": PackedRouting,
    "Cache": Cache,
    "Heads": Heads,
    "Sequences": Sequences,
    "Sparse": SparseStruct,
    "AttentionLimits": AttentionLimits,
    "Rope": Rope,
    "HeadNorms": HeadNormsStruct,
    "Attention": Attention,
    "Experts": Experts,
    "ExpertRows": ExpertRows,
    "Mixture": Mixture,
    "Layer": LayerStruct,
    "Decoder": DecoderStruct,
    "Taken": TakenStruct,
    "Step": StepStruct,
    "Head": HeadStruct,
    "Passes": PassesStruct,
    "Tally": TallyStruct,
}


@cache
def library() -> Library | None:
    """None where the kernels were not built, or the environment says not to use them.

    Raises StaleLibrary for a library that does not fit these sources.
    """
    wanted = os.environ.get(ISA_VARIABLE, "")
    if wanted == "none" or not PATH.is_file():
        return None
    handle = ctypes.CDLL(str(PATH))
    if not hasattr(handle, "diptych_sources") or text_of(handle.diptych_sources) != fingerprint():
        raise StaleLibrary(f"{PATH} was built from other sources: run {PATH.with_name('build.py')}")
    check_structs(structs_of(text_of(handle.diptych_structs)), mirrored())
    isas = available_isas(handle)
    return Library(handle, wanted if wanted in isas else isas[0])


def structs_of(table: str) -> dict[str, Fields]:
    """The structures of a table as src/structs.cpp writes it."""
    found: dict[str, Fields] = {}
    fields: Fields = {}
    for line in table.splitlines():
        *names, offset, size = line.split()
        if len(names) == 2:  # "struct" and its name
            fields = found[names[1]] = {}
        fields["" if len(names) == 2 else names[0]] = int(offset), int(size)
    return found


def mirrored() -> dict[str, Fields]:
    """Fields of the same structures as Python has them."""
    found = {name: _fields_of(mirror) for name, mirror in MIRRORS.items()}
    named: Any = BEST.fields
    best = {
        name: (int(offset), int(dtype.itemsize))
        for name, (dtype, offset, *_) in named.items()
        if name in ("logit", "id")
    }
    return {**found, "Best": {"": (0, BEST.itemsize), **best}}


def check_structs(compiled: dict[str, Fields], here: dict[str, Fields]) -> None:
    """Raise StaleLibrary where a structure, its size, or a field's name, offset or size differs."""
    for name in sorted(compiled.keys() | here.keys()):
        theirs, ours = compiled.get(name, {}), here.get(name, {})
        for field in sorted(theirs.keys() | ours.keys()):
            if theirs.get(field) != ours.get(field):
                what = f"{name}.{field}" if field else name
                raise StaleLibrary(
                    f"{what} has (offset, size) {theirs.get(field)} in {PATH} and {ours.get(field)} in Python: "
                    "correct kernels/cpu, and build it again"
                )


def _fields_of(mirror: type[ctypes.Structure]) -> Fields:
    fields: Fields = {"": (0, ctypes.sizeof(mirror))}
    for name, *_ in mirror._fields_:
        descriptor = getattr(mirror, name)
        fields[name] = descriptor.offset, descriptor.size
    return fields
