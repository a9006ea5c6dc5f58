"""Decode steps as graphs: one from tokens to logits per bucket of rows, one from logits to tokens per host buffer set.

They compute on the main lane from StepBuffers alone, whatever contexts the rows have: where contexts are cut is decided
on the device (kernels/attention/decode_plan.py). Idle rows have no context; they are stored nowhere.

Steps with drafts have graphs of their own, in which rows of a draft attend together (query_pieces.py): one for each
bucket, whichever sequences have drafts, and however long they are. Where a model has so many query heads for each KV
head that one row fills a tile of the attention kernel, the rows of drafts attend one by one, in the graphs of decodes.

With sparse attention there is each of these once more, for steps in which some row is sparse: in the layers that have
bounds all rows attend twice, as if the others had no context.

Of several ranks all capture and replay the same. Rank 0 alone has logits and samples; its tokens go to the others in
the same graph, so that the next step finds its input there too.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ....kernels.attention.decode_plan import MAX_QUERIES, tile_rows
from ...device.device import Device, Lane
from ...models.families.spec import AttentionSpec, LatentSpec, ModelSpec
from ...models.layers.attention import StepMeta
from ...models.layers.sparse import SparseDecodes
from ...models.layers.tail import TailStep
from .buckets import bucket_for, row_buckets
from .device_sampler import DeviceSampler
from .forward import ForwardPieces
from .step_buffers import NUM_HOST_BUFFERS, StepBuffers

_LATENT_ROWS = 64  # query heads times rows: what their splits give would take too much memory otherwise


def queries_at_once(spec: ModelSpec, max_draft_tokens: int, element_size: int) -> int:
    """Number of a draft's rows that attend together: as many as one tile of the attention kernels holds in every layer.
    spec: of a rank's share; element_size: bytes of a number."""

    def fitting(of: AttentionSpec | LatentSpec) -> int:
        if isinstance(of, LatentSpec):
            return _LATENT_ROWS // of.num_heads
        return tile_rows(of.head_dim, element_size) // (of.num_heads // of.num_kv_heads)

    return min(1 + max_draft_tokens, MAX_QUERIES, max(min(fitting(layer.attention) for layer in spec.layers), 1))


class DecodeGraphs:
    def __init__(
        self, pieces: ForwardPieces, cos_sin: Tensor, buffers: StepBuffers, sampler: DeviceSampler | None
    ) -> None:
        """sampler: None on other ranks than 0."""
        self._pieces, self._cos_sin, self._buffers, self._sampler = pieces, cos_sin, buffers, sampler
        spec, element_size = pieces.decoder.spec, pieces.decoder.weights.embed.element_size()
        self.taken = pieces.new_taken(buffers.sizes.max_rows)  # of the last step's rows
        self.draft_queries = queries_at_once(spec, buffers.sizes.max_draft_tokens, element_size)
        self._buckets: tuple[int, ...] = ()
        # By bucket, rows that attend together, and whether some row is sparse.
        self._forward: dict[tuple[int, int, bool], Callable[[], None]] = {}
        self._choose: dict[tuple[int, int], Callable[[], None]] = {}  # by bucket and set of host buffers

    def capture(self, device: Device, lane: Lane) -> None:
        """Capture graphs for up to as many rows as the buffers have. Raises torch.OutOfMemoryError."""
        sizes, queries = self._buffers.sizes, self.draft_queries
        buckets = row_buckets(sizes.max_rows)
        most_alone = bucket_for(buckets, sizes.max_sequences if queries > 1 else sizes.max_rows)
        assert most_alone is not None
        if self._sampler is not None:
            for index in range(NUM_HOST_BUFFERS):
                self._sampler.write(index, [], [])
        for bucket in reversed(buckets):
            together = ([queries] if queries > 1 and bucket > 1 else []) + ([1] if bucket <= most_alone else [])
            for kind in [(bucket, at_once, sparse) for at_once in together for sparse in self._kinds]:
                self._forward[kind] = device.capture(lane, partial(self._compute, *kind))
            for index in range(NUM_HOST_BUFFERS):
                self._choose[bucket, index] = device.capture(lane, partial(self._sample, bucket, index))
        self._buckets = buckets

    def close(self) -> None:
        """Free the graphs; none can be launched any more."""
        self._buckets = ()
        self._forward.clear()
        self._choose.clear()

    def queries(self, bucket: int, *, has_drafts: bool) -> int:
        """Return how many rows attend together: 1 without drafts, unless the bucket is larger than steps without any
        are, which another worker's drafts may ask for."""
        return self.draft_queries if has_drafts or (bucket, 1, False) not in self._forward else 1

    def bucket(self, num_rows: int) -> int | None:
        return bucket_for(self._buckets, num_rows)

    def forward(self, bucket: int, max_queries: int, is_sparse: bool) -> None:
        """Device work: from what was uploaded to logits. max_queries: 1, or draft_queries. is_sparse: some row is."""
        self._forward[bucket, max_queries, is_sparse]()

    def choose(self, num_rows: int, index: int, *, is_plain: bool) -> None:
        """Device work: from logits to tokens. is_plain: a graph can do it."""
        bucket = self.bucket(num_rows) if is_plain else None
        if bucket is not None:
            self._choose[bucket, index]()
        else:
            self._sample(num_rows, index, is_plain=is_plain)

    @property
    def _kinds(self) -> tuple[bool, ...]:
        """Values of is_sparse."""
        return (False, True) if self._pieces.cache.bounds.layers else (False,)

    def _compute(self, bucket: int, max_queries: int, is_sparse: bool) -> None:
        buffers, decoder, cache = self._buffers, self._pieces.decoder, self._pieces.cache
        has_tail = cache.layout.has_tail
        of = buffers.inputs(bucket, max_queries, self._cos_sin, cache.layout.block_size, has_tail=has_tail)
        sparse = None
        if is_sparse:
            tables, num_chosen = of.paged.block_tables, cache.bounds.num_chosen
            sparse = SparseDecodes.of(of.paged, tables, *buffers.sparse(bucket), num_chosen)
        taken = None if self._pieces.taken is None else self._pieces.taken.alike
        tail = None if of.filled is None else TailStep(of.slots, of.filled)
        meta = StepMeta(self._pieces.angles(of.cos_sin), of.slots, of.paged, sparse, tail)
        hidden = decoder.forward(of.tokens, cache, meta, taken)
        if taken is not None and self.taken is not None:
            self.taken[:bucket].copy_(taken.rows)
        logits = decoder.whole_logits(hidden)
        if logits is not None:
            buffers.logits[:bucket].copy_(logits)

    def _sample(self, num_rows: int, index: int, *, is_plain: bool = True) -> None:
        logits, tokens = self._buffers.logits[:num_rows], self._buffers.tokens[:num_rows]
        if self._sampler is not None:
            self._sampler.upload(index)
            if is_plain:
                self._sampler.choose(index, logits, tokens, num_rows)
            else:
                self._sampler.process_and_choose(index, logits, self._buffers.tokens)
        self._pieces.decoder.group.broadcast(tokens)
