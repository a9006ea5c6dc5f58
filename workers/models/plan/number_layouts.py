"""Layouts in which the compiled kernels compute a quantised checkpoint's weights as they are stored, by its config, and
for a plan by the names of its tensors, where these are at hand.

Numbers of 2, 3 and 4 bits become int4 and others int8: a weight is number x scale + offset, and an offset what a zero
point means. No torch.
"""

from pathlib import Path

from ....kernels.cpu.formats import Format, NumberLayout
from ..families.compressed_config import CompressedTensors, Kind, SchemeGroup
from ..families.quantisation import (
    Awq,
    BitsAndBytes,
    Fp8,
    Gguf,
    Gptq,
    ModelOpt,
    Mxfp4,
    Quantisation,
    read_quantisation,
)
from ..families.spec import ModelSpec
from ..gguf.gguf_files import read_gguf
from ..gguf.gguf_names import gguf_source
from .formats import IN_LAYERS
from .ggml_layouts import GGML_LAYOUTS
from .shards import SINGLE_FILE, read_index, stored_names
from .tensor_names import Piece, layer_tensors, outer_tensors, own_name

MXFP4_GROUP = 32
BITSANDBYTES_BLOCK = 64  # its default; the tensors say how many it is
# Ends of the names of tensors that a quantised weight has, by the module's name and by the weight's.
OF_MODULES = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "SCB")
OF_WEIGHTS = ("_blocks", ".absmax")


def number_layout(config: Quantisation, module: str, k: int) -> NumberLayout | None:
    """Return the layout of a weight of k inputs that is quantised; None: it is decoded. bitsandbytes' weights say
    themselves how they are stored."""
    match config:
        case CompressedTensors():
            group = config.group_of(module)
            return None if group is None else _of_scheme(group, k)
        case Gptq():
            found = _of_bits(config.bits), config.group_size or k, config.is_symmetric is not True
        case Awq():
            found = Format.INT4, config.group_size or k, config.has_zeros
        case Fp8():
            found = Format.FP8, min(config.block[1], k) if config.block else k, False
        case ModelOpt(algorithm="FP8"):
            found = Format.FP8, k, False
        case ModelOpt():
            found = Format.TABLE4, config.group_size, False
        case Mxfp4():
            found = Format.TABLE4, MXFP4_GROUP, False
        case _:
            return None
    has_order = isinstance(config, Gptq) and not config.is_in_order
    return NumberLayout(*found, has_order=has_order, has_fp8_rows=found[0] == Format.FP8)


def planned_layouts(folder: Path, spec: ModelSpec) -> dict[str, NumberLayout]:
    """Return the layouts of the weights of a checkpoint that can be kept, by name, without its files where they are not
    at hand: by config.json alone all products are quantised but those that it names. Raises CheckpointError."""
    config = read_quantisation(folder)
    if config is None:
        return {}
    fields = (layer_tensors(spec, i) for i in range(spec.num_layers))
    pieces = [piece for of in fields for field, each in of.items() if field in IN_LAYERS for piece in each]
    heads = outer_tensors(spec).get("lm_head", ())
    if isinstance(config, Gguf):
        types = _ggml_types(folder)
        found = ((piece.name, _of_blocks(config, piece, types)) for piece in (*pieces, *heads))
    else:
        stored = set(read_index(folder)) or (stored_names(folder) if (folder / SINGLE_FILE).is_file() else set[str]())
        names = {own for name in stored if (own := own_name(spec, name)) is not None}
        if stored or isinstance(config, CompressedTensors):  # else a head is rarely quantised
            pieces += heads
        found = ((piece.name, _planned(config, piece, names)) for piece in pieces)
    return {name: layout for name, layout in found if layout is not None}


def _ggml_types(path: Path) -> dict[str, str]:
    """Return the types of a GGUF model's tensors, by name."""
    model = read_gguf(path)
    return {} if model is None else {name: of.type.name for name, of in model.tensors.items()}


def _of_blocks(config: Gguf, piece: Piece, types: dict[str, str]) -> NumberLayout | None:
    source = gguf_source(config.architecture, piece.name)
    if source is None or source.is_stacked:
        return None
    type_name = types.get(source.names[0]) or types.get(source.by_expert)
    return None if type_name is None else GGML_LAYOUTS.get(type_name)


def _planned(config: Quantisation, piece: Piece, names: set[str]) -> NumberLayout | None:
    """names: of all tensors; empty: they are not known."""
    name, k = piece.name, piece.shape[1]
    module = name.removesuffix(".weight")
    if len(piece.shape) != (3 if isinstance(config, Mxfp4) else 2):
        return None
    of_weight = (*(f"{module}.{of}" for of in OF_MODULES), *(f"{name}{of}" for of in OF_WEIGHTS))
    if names and names.isdisjoint(of_weight):
        return None
    if not isinstance(config, BitsAndBytes):
        return number_layout(config, module, k)
    return NumberLayout(Format.INT8, k) if config.bits == 8 else in_blocks(k, BITSANDBYTES_BLOCK)


def in_blocks(k: int, block: int) -> NumberLayout | None:
    """Layout of numbers of 4 bits of which each `block`, as they lie in memory, share a scale."""
    return None if k % block else _in_table(block)


def _of_scheme(of: SchemeGroup, k: int) -> NumberLayout | None:
    if of.format in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        return _in_table(of.group_size or (16 if of.format.startswith("nvfp4") else MXFP4_GROUP))
    group = k
    if of.strategy == "group":
        group = of.group_size
    elif of.strategy == "block":
        group = min(of.block[1], k) if of.block else 0
    if group == 0:
        return None
    is_packed = of.format == "pack-quantized"
    if of.kind == Kind.FLOAT:
        is_fp8 = of.bits == 8 and not is_packed
        return NumberLayout(Format.FP8, group, has_fp8_rows=of.has_fp8_rows) if is_fp8 else None
    if of.quantises_rows and of.is_symmetric and group == k and not is_packed:
        return NumberLayout(Format.W8A8, k)
    has_order = not of.is_in_order and group < k
    return NumberLayout(_of_bits(of.bits) if is_packed else Format.INT8, group, not of.is_symmetric, has_order)


def _of_bits(bits: int) -> Format:
    return Format.INT4 if bits <= 4 else Format.INT8


def _in_table(group: int) -> NumberLayout:
    return NumberLayout(Format.TABLE4, group)
