"""The pieces of a head's tensors, as plan/tensor_names.py names those of a decoder. Knows no head, and no torch."""

from ..families.spec import ModelSpec
from ..plan.tensor_names import Piece, Pieces, layer_tensors

Fields = dict[str, Pieces]
OPTIONAL = frozenset({"embed", "lm_head"})  # fields that may be the target's


def layer_fields(decoder: ModelSpec) -> list[Fields]:
    """Return the pieces of each layer."""
    return [layer_tensors(decoder, i) for i in range(decoder.num_layers)]


def norm(decoder: ModelSpec, name: str, size: int | None = None) -> Pieces:
    """Return the piece of an RMSNorm outside the layers, of `size` numbers, the hidden size if None."""
    shape = (decoder.hidden_size if size is None else size,)
    return (Piece(f"{name}.weight", shape, offset=decoder.norm_offset, is_wide=decoder.wide_norms),)


def matrix(name: str, rows: int, columns: int) -> Pieces:
    return (Piece(f"{name}.weight", (rows, columns)),)
