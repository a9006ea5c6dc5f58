"""Decode steps as graphs: one from tokens to logits per bucket of rows, one from logits to tokens per host buffer set.

They compute on the main lane from StepBuffers alone, whatever contexts the rows have: where contexts are cut is decided
on the device (kernels/attention/decode_plan.py). Idle rows have no context; they are stored nowhere.

Of several ranks all capture and replay the same. Rank 0 alone has logits and samples; its tokens go to the others in
the same graph, so that the next step finds its input there too.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ....kernels.attention.paged_batch import PagedBatch
from ....kernels.elementwise.step_inputs import step_inputs
from ...device.device import Device, Lane
from ...models.layers.attention import StepMeta
from .buckets import bucket_for, row_buckets
from .device_sampler import DeviceSampler
from .forward import ForwardPieces
from .step_buffers import NUM_HOST_BUFFERS, StepBuffers


class DecodeGraphs:
    def __init__(
        self, pieces: ForwardPieces, cos_sin: Tensor, buffers: StepBuffers, sampler: DeviceSampler | None
    ) -> None:
        """sampler: None on other ranks than 0."""
        self._pieces, self._cos_sin, self._buffers, self._sampler = pieces, cos_sin, buffers, sampler
        self._buckets: tuple[int, ...] = ()
        self._forward: dict[int, Callable[[], None]] = {}  # by bucket
        self._choose: dict[tuple[int, int], Callable[[], None]] = {}  # by bucket and set of host buffers

    def capture(self, device: Device, lane: Lane) -> None:
        """Capture graphs for up to as many rows as the buffers have. Raises torch.OutOfMemoryError."""
        buckets = row_buckets(self._buffers.max_rows)
        if self._sampler is not None:
            for index in range(NUM_HOST_BUFFERS):
                self._sampler.write(index, [], [])
        for bucket in reversed(buckets):
            self._forward[bucket] = device.capture(lane, partial(self._compute, bucket))
            for index in range(NUM_HOST_BUFFERS):
                self._choose[bucket, index] = device.capture(lane, partial(self._sample, bucket, index))
        self._buckets = buckets

    def close(self) -> None:
        """Free the graphs; none can be launched any more."""
        self._buckets = ()
        self._forward.clear()
        self._choose.clear()

    def bucket(self, num_rows: int) -> int | None:
        return bucket_for(self._buckets, num_rows)

    def forward(self, bucket: int) -> None:
        """Device work: from what was uploaded to logits."""
        self._forward[bucket]()

    def choose(self, num_rows: int, index: int, *, is_plain: bool) -> None:
        """Device work: from logits to tokens. is_plain: a graph can do it."""
        bucket = self.bucket(num_rows) if is_plain else None
        if bucket is not None:
            self._choose[bucket, index]()
        else:
            self._sample(num_rows, index, is_plain=is_plain)

    def _compute(self, bucket: int) -> None:
        buffers, decoder, cache = self._buffers, self._pieces.decoder, self._pieces.cache
        rows, block_size = buffers.rows(bucket), cache.layout.block_size
        tokens, cos_sin, slots = step_inputs(rows, self._cos_sin, block_size)
        paged = PagedBatch(
            rows.block_tables,
            rows.context_lens,
            buffers.query_starts[: bucket + 1],
            host_context_lens=[],
            host_num_new=[1] * bucket,
            num_decodes=bucket,
            block_size=block_size,
        )
        hidden = decoder.forward(tokens, cache, StepMeta(self._pieces.angles(cos_sin), slots, paged))
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
                self._sampler.process_and_choose(index, logits, tokens)
        self._pieces.decoder.group.broadcast(tokens)
