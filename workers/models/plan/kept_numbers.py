"""Choice of the weights that a rank keeps in the numbers of a quantised checkpoint, for the compiled kernels. No torch.

Weights of products are kept, with no second rounding, where those that are fused into one have a layout in common;
others, and embeddings, are decoded. `quantize` is then for what the checkpoint does not hold in few bits, or in more
than `quantize` asks for: a checkpoint that has fewer contradicts it. It may say either way whether rows are quantised,
too, that int8 weights are multiplied by.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from ....kernels.cpu.formats import Format, NumberLayout, layout_of_parts
from ...common.errors import ConfigError
from .formats import IN_LAYERS, QUANTIZE
from .sharding import Share, part_of_piece
from .tensor_names import Piece, Pieces

Layouts = Mapping[str, NumberLayout]  # of the weights of a checkpoint that can be kept, by name
NONE: Layouts = MappingProxyType({})
DESCRIPTIONS = {
    Format.INT8: "int8",
    Format.INT4: "int4",
    Format.TABLE4: "floats of 4 bits",
    Format.FP8: "fp8",
    Format.W8A8: "int8 with rows in int8",
}


def kept_layout(
    layouts: Layouts, field: str, pieces: Pieces, share: Share, quantize: str | None
) -> NumberLayout | None:
    """Return the layout in which the pieces of `field` are kept; None: they are not. Raises ConfigError where
    `quantize` contradicts the checkpoint."""
    if not layouts or field not in (*IN_LAYERS, "lm_head"):
        return None
    own = [layouts.get(piece.name) for piece in pieces]
    k = pieces[0].own_shape[-1]
    inputs = inputs_of(pieces[0], share)
    found = layout_of_parts(own, k, inputs)
    if found is None or quantize is None or QUANTIZE[quantize] == found.format:
        return found
    if {QUANTIZE[quantize], found.format} == {Format.INT8, Format.W8A8} and _by_output(found, len(inputs)):
        return replace(found, format=QUANTIZE[quantize])
    if QUANTIZE[quantize].inputs < found.format.inputs:
        raise ConfigError(
            f"quantize={quantize} asks for more bits than the checkpoint's {pieces[0].name} has "
            f"({DESCRIPTIONS[found.format]}): leave it out, and the weights are computed as they are stored"
        )
    return None


def _by_output(of: NumberLayout, num_inputs: int) -> bool:
    return of.group >= num_inputs and not of.has_offsets


def quantises_rows(layouts: Layouts, quantize: str | None, *, has_fp8: bool) -> bool:
    """Return whether a GPU quantises the rows that weights are multiplied by. has_fp8: whether it multiplies FP8."""
    if not layouts:
        return quantize is not None and QUANTIZE[quantize] == Format.W8A8
    return all(of.format == Format.W8A8 or (of.has_fp8_rows and has_fp8) for of in layouts.values())


def inputs_of(piece: Piece, share: Share) -> range:
    """Inputs of a weight that `share` holds."""
    part = part_of_piece(piece, share)
    inputs = range(piece.own_shape[-1])
    return inputs[part[1]] if len(part) > 1 else inputs


def described(fields: Iterable[Mapping[str, Pieces]], layouts: Layouts, share: Share, quantize: str | None) -> str:
    """Return one line that says how many of the products are computed in which numbers."""
    found: Counter[str] = Counter()
    for own in fields:
        for field, pieces in own.items():
            if field not in (*IN_LAYERS, "lm_head"):
                continue
            layout = kept_layout(layouts, field, pieces, share, quantize)
            found[_name_of(layout, pieces[0].own_shape[-1])] += 1
    return ", ".join(f"{num} in {name}" for name, num in found.most_common())


def _name_of(layout: NumberLayout | None, k: int) -> str:
    if layout is None:
        return "decoded weights"
    groups = f", groups of {layout.group}" if layout.group < k else ""
    order = ", inputs by activations" if layout.has_order else ""
    return DESCRIPTIONS[layout.format] + groups + order + (", zero points" if layout.has_offsets else "")
