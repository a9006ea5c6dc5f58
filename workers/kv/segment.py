"""A range of blocks and layers of a sequence's KV, as hand-offs announce and read it. Plain data, no torch."""

from dataclasses import dataclass

from ...proto import kv_pb2
from ..common.errors import HandoffError

CHECKSUM_BYTES = 16  # a block


@dataclass(frozen=True, slots=True)
class Segment:
    """Blocks [first_block, first_block + len(block_ids)) of the sequence's table, some of their layers."""

    first_block: int
    block_ids: tuple[int, ...]  # of the source
    generations: tuple[int, ...]
    first_layer: int
    num_layers: int
    checksum: bytes = b""  # CHECKSUM_BYTES per block (proto/kv.proto); empty unless requested

    @property
    def positions(self) -> range:
        return range(self.first_block, self.first_block + len(self.block_ids))

    @property
    def layer_mask(self) -> int:
        return ((1 << self.num_layers) - 1) << self.first_layer

    def is_well_formed(self, num_blocks: int, num_layers: int) -> bool:
        """Return whether it names some blocks and layers, each inside a table and a model of this size."""
        return (
            0 < len(self.block_ids) == len(self.generations)
            and self.first_block + len(self.block_ids) <= num_blocks
            and 0 < self.num_layers <= num_layers - self.first_layer
        )

    def within(self, first: int, end: int) -> "Segment":
        """The part from table position `first` to `end`, perhaps without any block."""
        skip = max(first - self.first_block, 0)
        kept = slice(skip, max(end - self.first_block, skip))
        return Segment(
            self.first_block + skip,
            self.block_ids[kept],
            self.generations[kept],
            self.first_layer,
            self.num_layers,
            self.checksum[skip * CHECKSUM_BYTES : kept.stop * CHECKSUM_BYTES],
        )

    def to_proto(self) -> kv_pb2.Segment:
        return kv_pb2.Segment(
            first_block=self.first_block,
            block_ids=self.block_ids,
            generations=self.generations,
            first_layer=self.first_layer,
            num_layers=self.num_layers,
            checksum=self.checksum,
        )

    @classmethod
    def from_proto(cls, message: kv_pb2.Segment, max_blocks: int) -> "Segment":
        """Read a segment. Raises HandoffError for more than `max_blocks`, before it copies them; else unchecked: see
        `is_well_formed`."""
        num = max(len(message.block_ids), len(message.generations))
        if num > max_blocks:
            raise HandoffError(f"a segment has {num:,} blocks, but at most {max_blocks:,} are possible")
        return cls(
            message.first_block,
            tuple(message.block_ids),
            tuple(message.generations),
            message.first_layer,
            message.num_layers,
            message.checksum,
        )


@dataclass(frozen=True, slots=True)
class Read:
    """Read `segment` into the blocks of our `table`, and nothing of the tokens before `first_token`: their blocks are
    shared. Answer with `read_done` or `read_failed`."""

    number: int
    segment: Segment
    table: tuple[int, ...]
    first_token: int
