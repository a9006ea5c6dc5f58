"""Memory of a head's weights, from its config.json and the names of its tensors. Arithmetic only, no torch."""

import math
from collections.abc import Iterable
from pathlib import Path

from ...kv.dtypes import DTYPE_BYTES
from ..families.spec import ModelSpec
from ..plan.shards import stored_names
from ..plan.tensor_names import Piece
from .eagle3_config import Eagle3Config
from .eagle3_tensors import eagle3_fields, eagle3_name
from .head_config import read_head
from .head_fields import OPTIONAL
from .mtp_tensors import mtp_fields, mtp_name, no_module


def head_weight_bytes(folder: Path, target: ModelSpec, dtype: str) -> int:
    """Bytes of the weights of the head in `folder`. A matrix that the head has from its target is a copy, and counts;
    embeddings and output matrix of the target that are tied are one. dtype: a key of DTYPE_BYTES. Raises what
    read_head_spec raises, and CheckpointError for files that are missing or broken."""
    config, stored = read_head(folder, target), stored_names(folder)
    if isinstance(config, Eagle3Config):
        layers, outer = eagle3_fields(config)
        names = {eagle3_name(name) for name in stored}
    else:
        layers, outer = mtp_fields(config.head.decoder)
        names = {mtp_name(config.target, name) for name in stored}
        if not _has(names, "eh_proj.weight"):
            raise no_module(folder, config.target)
    shared = {field for field in OPTIONAL if not _has(names, outer[field][0].name)}
    own = (piece for of in (*layers, outer) for field, pieces in of.items() if field not in shared for piece in pieces)
    num_copies = 1 if target.tie_word_embeddings else len(shared)
    copies = min(num_copies, len(shared)) * target.vocab_size * target.hidden_size
    return _bytes_of(own, DTYPE_BYTES[dtype]) + copies * DTYPE_BYTES[dtype]


def _has(names: set[str | None], weight: str) -> bool:
    """Return whether a weight is there, or what it is stored as where it is quantised."""
    module = f"{weight.removesuffix('.weight')}."
    return any(name is not None and name.startswith(module) for name in names)


def _bytes_of(pieces: Iterable[Piece], item_bytes: int) -> int:
    return sum(math.prod(piece.own_shape) * (4 if piece.is_wide else item_bytes) for piece in pieces)
