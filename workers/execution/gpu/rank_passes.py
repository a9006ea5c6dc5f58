"""Passes of what drafts, of a rank on its own device, as rank 0 plans them (PassPlan); a worker of one GPU has no other
rank.

    rank 0    plan ── broadcast ──>  each rank   tables of the first pass ── pass 1 ── pass 2 ── ...
    one pass  upload ── graph, from tokens to logits            (draft_passes.py samples them, on rank 0)

Before a further pass all ranks are told, in its graph, the tokens that the pass before has drafted on rank 0's device.
So rank 0 sends one message a draft, however many passes it has.

On rank 0 a draft begins when a step was waited for, and is waited for before the next one. The other ranks wait so too.

Where the passes' experts are other workers', too, all of them launch as many passes, of as many rows (PassesSize), some
of them idle.
"""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from torch import Tensor

from ...common.errors import RankLost
from ...device.device import Device, Lane
from ...device.device_errors import LESS_KV, needing_memory
from ...device.kv_cache import KVCache
from ...models.layers.attention import StepMeta
from ...models.layers.decoder import Decoder
from ...models.layers.rope import Ropes
from ...models.layers.row_exchange import RowExchange
from ...models.layers.step import Step, StepLimits
from ...ranks.agreed_step import PassesSize
from ...ranks.rank_processes import RankProcesses
from ...sampling.sampler import Sampler
from .buckets import StepSizes, bucket_for, row_buckets
from .device_tables import DeviceTables
from .forward import ForwardPieces
from .prompt_part import TABLE_BLOCKS
from .step_buffers import NUM_HOST_BUFFERS, StepBuffers
from .step_plan import DRAFT_STEP, NOTHING, PASSES, Ints, PassPlan, PlanLimits

T = TypeVar("T")
A_PASS = "a pass of the draft"
REMEDY = f"{LESS_KV} or max_running, or set cuda_graphs to false"


class PassWork(Protocol):
    """Device work of a pass, which may be captured: from the first `bucket` rows of the buffers to their logits."""

    @property
    def cache(self) -> KVCache: ...

    @property
    def cos_sin(self) -> Tensor:
        """[positions, A] float32, of the ropes of what drafts."""
        ...

    @property
    def exchange(self) -> RowExchange | None:
        """Exchange with workers that compute each pass too; None: there are none."""
        ...

    def first(self, buffers: StepBuffers, bucket: int) -> None: ...

    def further(self, buffers: StepBuffers, bucket: int) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A PassWork: a decoder's, of one rank."""

    pieces: ForwardPieces
    cos_sin: Tensor  # [positions, A] float32

    @property
    def cache(self) -> KVCache:
        return self.pieces.cache

    @property
    def exchange(self) -> RowExchange | None:
        return self.pieces.decoder.exchange

    def first(self, buffers: StepBuffers, bucket: int) -> None:
        decoder, cache = self.pieces.decoder, self.pieces.cache
        of = buffers.inputs(bucket, 1, self.cos_sin, cache.layout.block_size)
        meta = StepMeta(self.pieces.angles(of.cos_sin), of.slots, of.paged)
        logits = decoder.whole_logits(decoder.forward(of.tokens, cache, meta))
        if logits is not None:  # at rank 0
            buffers.logits[:bucket].copy_(logits)

    def further(self, buffers: StepBuffers, bucket: int) -> None:
        self.pieces.decoder.group.broadcast(buffers.tokens[:bucket])
        self.first(buffers, bucket)


class RankPasses:
    """Passes that follow one another, of any kind of work."""

    def __init__(
        self,
        device: Device,
        work: PassWork,
        sizes: StepSizes,
        max_rows: int,
        logits: Tensor | None,
        *,
        has_graphs: bool,
    ) -> None:
        """sizes: of the target's steps. max_rows: of a first pass. logits: see StepBuffers. All ranks do it together.
        Raises ConfigError where the device has too little memory."""
        self.device, self._work, self.max_rows = device, work, max_rows
        self.lane, self.block_size = device.lane("drafts"), work.cache.layout.block_size
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}  # by bucket, and whether it is of a first pass
        self.buckets: tuple[int, ...] = ()  # those of graphs
        with needing_memory("the buffers and graphs of drafts", REMEDY):
            num_blocks = work.cache.layout.num_blocks_for(len(work.cos_sin))
            max_blocks = -(-num_blocks // TABLE_BLOCKS) * TABLE_BLOCKS
            self.buffers = StepBuffers(device, sizes, max_blocks, logits)
            self._tables = DeviceTables(device, max_blocks, sizes.max_sequences)
            device.synchronize()
            try:
                if has_graphs:
                    self._capture()
                device.synchronize()
            except BaseException:
                self.close()
                raise

    @property
    def most_further(self) -> int:
        """Largest bucket of a further pass."""
        bucket = bucket_for(row_buckets(self.max_rows), min(self.buffers.sizes.max_sequences, self.max_rows))
        assert bucket is not None
        return bucket

    def _capture(self) -> None:
        buckets, most_further = row_buckets(self.max_rows), self.most_further
        for bucket in reversed(buckets):
            works = {True: self._work.first}
            works |= {False: self._work.further} if bucket <= most_further else {}
            for is_first, work in works.items():
                captured = self.device.capture(self.lane, partial(work, self.buffers, bucket))
                self._graphs[bucket, is_first] = captured
        self.buckets = buckets

    def close(self) -> None:
        """Free the graphs; none can be launched any more. A communicator does not end while they hold its calls."""
        self.buckets = ()
        self._graphs.clear()

    def begin(self, plan: PassPlan) -> None:
        """Bring the block tables up to date."""
        if plan.tables.size:
            self._tables.change(self.lane, plan.tables)

    def write(self, number: int, columns: Ints, num_rows: int = 0) -> int:
        """Write the host buffers of a pass, once the pass that used them is computed. columns: of PassPlan. num_rows:
        that it has at least, some of them idle. Returns its bucket of rows."""
        host, num_rows = self.buffers.host[number % NUM_HOST_BUFFERS], max(num_rows, columns.shape[1])
        host.wait()
        bucket = bucket_for(self.buckets, num_rows) or num_rows
        host.write(columns, bucket, 1)
        return bucket

    def serve(self, size: PassesSize) -> None:
        """Launch passes of other workers' drafts."""
        for number in range(size.num_passes):
            bucket = self.write(number, NOTHING.decodes, num_rows_of(size, number))
            self.lane.run(partial(self.compute, number, bucket))
            self.hold(number)

    def compute(self, number: int, bucket: int) -> None:
        """Device work: from what was written to logits."""
        buffers, is_first = self.buffers, number == 0
        buffers.upload(buffers.host[number % NUM_HOST_BUFFERS])
        if is_first:
            buffers.gather_tables(self._tables.tensor, bucket)
        graph = self._graphs.get((bucket, is_first))
        if graph is not None:
            graph()
            return
        if self._work.exchange is not None:
            self._work.exchange.agree(bucket)
        (self._work.first if is_first else self._work.further)(buffers, bucket)

    def hold(self, number: int) -> None:
        """Let the host buffers of this pass be written again only once what was launched is computed."""
        self.buffers.host[number % NUM_HOST_BUFFERS].used = self.lane.record()

    def follow(self, message: Ints, of: StepLimits) -> None:
        """Compute all passes of a draft, on another rank than 0, and wait for them. Raises InternalError for an invalid
        message of a PassPlan."""
        num_rows, width = self._tables.tensor.shape
        sizes, num_layers = self.buffers.sizes, self._work.cache.layout.num_layers
        kept = of.num_blocks, of.block_size, num_layers, of.max_context_tokens, of.vocab_size
        limits = PlanLimits(self.max_rows, (num_rows, width), *kept)
        plan = limits.parse_passes(message, sizes.max_sequences, sizes.max_draft_tokens)
        self.begin(plan)
        for number in range(plan.num_passes):
            bucket = self.write(number, plan.columns(number))
            self.lane.run(partial(self.compute, number, bucket))
            self.hold(number)
        self.lane.record().wait()


@dataclass(frozen=True, slots=True)
class LaneDecoder:
    """A StepDecoder, which launches kernel by kernel."""

    decoder: Decoder
    cache: KVCache
    cos_sin: Ropes
    sampler: Sampler
    lane: Lane
    ranks: RankProcesses | None = None  # those that compute each step with us, on rank 0

    @property
    def passes(self) -> None:
        """See StepDecoder."""

    def compute(self, step: Step) -> Tensor | None:
        """See StepDecoder."""
        with self.ranks.sharing(A_PASS) if self.ranks is not None else nullcontext():
            if self.ranks is not None:
                own = replace(step, is_draft=True).to_message()
                self.ranks.broadcast(np.concatenate((np.array([DRAFT_STEP], dtype=np.int32), own)))
            return wait_for(self.lane, lambda: self.decoder.compute(step, self.cache, self.cos_sin))


@dataclass(frozen=True, slots=True)
class FollowedDraft:
    """Share of what drafts, of a rank other than 0."""

    device: Device
    steps: LaneDecoder
    passes: RankPasses
    limits: StepLimits

    def follow(self, message: Ints) -> None:
        """Compute what a message of the draft asks for. Raises InternalError where it is invalid."""
        # As rank 0 has: the passes are on another lane than the target's steps.
        self.device.synchronize()
        if message[0] == PASSES:
            self.passes.follow(message, self.limits)
        else:
            self.steps.compute(Step.from_message(message[1:], self.limits, is_draft=True))


def num_rows_of(size: PassesSize, number: int) -> int:
    """Rows of pass `number`, on each of the workers that share it."""
    return size.num_sequences if number else size.num_rows


def is_of_draft(message: Ints) -> bool:
    """Return whether a message, which is not checked yet, is of what drafts."""
    return len(message) > 0 and int(message[0]) in (PASSES, DRAFT_STEP)


def wait_for(lane: Lane, work: Callable[[], T]) -> T:
    """Do work on a lane, wait for it, and return what it gives."""
    found: list[T] = []
    try:
        lane.run(lambda: found.append(work()))
        lane.record().wait()
    except Exception:
        settle(lane)
        raise
    return found[0]


def settle(lane: Lane) -> None:
    """Wait for what was launched before something failed: the target's next step writes where that does."""
    with suppress(RuntimeError, RankLost):  # a lost device or rank is reported already
        lane.record().wait()
