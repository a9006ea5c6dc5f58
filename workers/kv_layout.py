"""How one worker's KV cache lies in memory, in a form that two workers can compare. No torch."""

from dataclasses import dataclass, fields

from ..proto import kv_pb2
from .errors import LayoutMismatch

AXIS_ORDER = "block,layer,kv,slot,head,dim"
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Block-major: a block is one contiguous run, so that a whole block is one descriptor on the wire."""

    dtype: str
    block_size: int  # slots (tokens) a block
    num_layers: int
    num_kv_heads: int
    head_dim: int
    model_id: str  # fingerprint of the checkpoint
    axis_order: str = AXIS_ORDER

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer in one block."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def to_proto(self) -> kv_pb2.KVLayout:
        return kv_pb2.KVLayout(**{f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def from_proto(cls, message: kv_pb2.KVLayout) -> "KVLayout":
        return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})

    def check_same(self, peer: "KVLayout") -> None:
        """Raise LayoutMismatch, showing the two layouts side by side, unless KV can move between them."""
        rows = [
            f"{f.name}: {getattr(self, f.name)} here, {getattr(peer, f.name)} there"
            for f in fields(self)
            if getattr(self, f.name) != getattr(peer, f.name)
        ]
        if rows:
            raise LayoutMismatch(
                "the two workers' KV caches differ (" + "; ".join(rows) + "): give both pools the same settings"
            )


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The cache's memory as transports see it: `num_blocks` runs of `block_bytes` from `address` on."""

    address: int
    num_blocks: int
    block_bytes: int
    layer_bytes: int
    view: memoryview | None  # writable bytes of the whole pool; None for device memory
    device_id: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def run(self, block: int, first_layer: int, num_layers: int) -> tuple[int, int]:
        """(offset from `address`, length) in bytes of a range of layers of one block."""
        return block * self.block_bytes + first_layer * self.layer_bytes, num_layers * self.layer_bytes
