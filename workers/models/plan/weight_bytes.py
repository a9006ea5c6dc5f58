"""Memory of a rank's weights, from the spec alone. Arithmetic only, no torch."""

import math
from collections.abc import Collection, Sequence

from ....kernels.cpu.formats import stored_bytes
from ...common.errors import InsufficientMemory
from ...kv.dtypes import DTYPE_BYTES
from ..families.spec import ModelSpec
from .formats import format_of
from .kept_numbers import NONE, Layouts, inputs_of, kept_layout
from .sharding import Share, layer_fields, shape_of_part
from .tensor_names import Pieces, outer_tensors


def weight_bytes(
    spec: ModelSpec,
    share: Share,
    dtype: str,
    quantize: str | None = None,
    layouts: Layouts = NONE,
    decoded: Collection[str] = (),
) -> dict[str, int]:
    """Bytes of each field of LayerWeights, over all layers, and of DecoderWeights, that `share` holds.

    dtype: a key of DTYPE_BYTES; quantize: of QUANTIZE, or None; layouts: of the weights that may be kept as a quantised
    checkpoint stores them; decoded: fields that are at full size in any case. A head that is tied to the embeddings is
    these, unless it is quantised. What the compiled kernels pad is not counted, nor what a GPU saves by scales of 16
    bits.
    """
    found: dict[str, int] = {}
    layers = [layer_fields(spec, i, share) for i in range(spec.num_layers)]
    for fields in (*layers, outer_tensors(spec, has_own_head=quantize is not None)):
        for field, pieces in fields.items():
            how = (None, NONE) if field in decoded else (quantize, layouts)
            found[field] = found.get(field, 0) + (
                _kept_bytes(field, pieces, share, *how) or _bytes_of(field, pieces, share, DTYPE_BYTES[dtype], how[0])
            )
    return found


def check_fits(
    spec: ModelSpec,
    shares: Sequence[Share],
    dtype: str,
    quantize: str | None,
    available: int,
    draft_bytes: int = 0,
    layouts: Layouts = NONE,
    decoded: Collection[str] = (),
) -> None:
    """Raise InsufficientMemory where the weights of these ranks, whose memory is one, take more bytes than `available`,
    with `draft_bytes` of a model, or a head, that drafts."""
    needed = sum(sum(weight_bytes(spec, of, dtype, quantize, layouts, decoded).values()) for of in shares) + draft_bytes
    if needed > available:
        of_draft = f", {draft_bytes:,} of them for what drafts" if draft_bytes else ""
        smaller = "a smaller model, or leave out speculation" if draft_bytes else "a smaller model"
        raise InsufficientMemory(
            f"the weights take {needed:,} bytes in {dtype}{of_draft}, but {available:,} are free: set quantize, use a "
            f"machine with more memory, or use {smaller}"
        )


def _kept_bytes(field: str, pieces: Pieces, share: Share, quantize: str | None, layouts: Layouts) -> int | None:
    """Number of bytes of a field that is kept as it is stored; None: it is not."""
    layout = kept_layout(layouts, field, pieces, share, quantize)
    if layout is None:
        return None
    num_rows = sum(shape_of_part(piece, share)[0] for piece in pieces)
    return layout.num_bytes(num_rows, len(inputs_of(pieces[0], share)))


def _bytes_of(field: str, pieces: Pieces, share: Share, item_bytes: int, quantize: str | None) -> int:
    total = 0
    for piece in pieces:
        *rows, k = shape_of_part(piece, share)
        total += stored_bytes(math.prod(rows), k, 4 if piece.is_wide else item_bytes, format_of(quantize, field))
    return total
