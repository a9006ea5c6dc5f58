"""The part of a step that is no captured decode: prompts, and what goes with them, on a lane of its own.

    write (host): its numbers, into pinned memory     ->     run: its device work on the lane, layer by layer

Up to the largest bucket of tokens the pieces between attention are graphs; beyond it launches take less time than what
they launch, and all is launched anew.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ....kernels.attention.paged_batch import LatentLibrary, PagedBatch, sent
from ....kernels.gemm.linear import Weight, row_counts
from ....kernels.moe.grouped_gemm import pair_counts
from ...core.sequence import KNOWN
from ...device.device import Device, Event, Lane
from ...models.checkpoint.packed_weights import products_of
from ...models.checkpoint.weights import LayerWeights
from ...models.families.spec import LayerSpec, MoeSpec
from ...models.layers.layer import Layer
from ...models.layers.sparse import SparseDecodes
from ...models.layers.tail import TailStep
from ...models.layers.turns import InTurns, finished
from ...sampling.pooled_rows import pieces_of_pooled
from ...sampling.pooler import Pooler
from ...sampling.prompt_scorer import PromptScorer, pieces_of
from ..common.expert_choice import choose_expert_kernels
from ..common.halves import Halves, first_rows
from ..common.library_choice import OURS, PromptLibraries
from .buckets import bucket_for, token_buckets
from .forward import ForwardBuffers, ForwardPieces
from .step_plan import NO_ROWS, Ints, Numbers

TABLE_BLOCKS = 16  # tables are a multiple of this many columns, because other strides need separately compiled kernels
_LONG = 4096  # a context that few new tokens may attend to in another way
# New tokens and contexts for which kernels are compiled apart.
_PROMPTS = ((1, 1), (16, 16), (33, 33), (512, 512), (16, _LONG))


def prompt_sizes(
    layers: Iterable[tuple[LayerSpec, LayerWeights]], max_tokens: int, num_workers: int = 1
) -> list[tuple[int, int]]:
    """Return numbers of new tokens, at most `max_tokens`, and contexts: prompts of them need every kernel that prompts
    of these layers may need. num_workers: those that share the experts, which compute as many tokens of each."""
    sizes, products = {(min(num_new, max_tokens), context_len) for num_new, context_len in _PROMPTS}, list[Weight]()
    for spec, weights in layers:
        products += products_of(weights)
        if isinstance(mixture := spec.feed_forward, MoeSpec):
            experts = weights.experts_down
            assert experts is not None
            pairs, each = pair_counts(experts.shape[0], experts.device), mixture.routing.top_k * num_workers
            num_tokens = {-(-num // each) for num in pairs}
            sizes |= {(num, num) for num in num_tokens if num <= max_tokens}
    return sorted(sizes | {(num, num) for num in row_counts(products) if num <= max_tokens})


@dataclass(slots=True, eq=False)
class PromptRun:
    """A part under way. Keep it until the step has been waited for: other lanes use its memory."""

    num_sampled: int
    logits: Tensor | None = None  # [num_sampled, vocab], once its lane is there; on other ranks than 0: None
    reached: list[tuple[int, Event]] = field(default_factory=list[tuple[int, Event]])  # of the cache's layers, and when
    scorer: PromptScorer | None = None  # on rank 0, if log-probabilities of prompts are due: complete too
    pooler: Pooler | None = None  # on rank 0, if embeddings are due: the same
    taken: Tensor | None = None  # [T, A], where a draft head is given hidden states


class PromptPart:
    def __init__(
        self, device: Device, lane: Lane, pieces: ForwardPieces, cos_sin: Tensor, tables: Tensor, yielded: Tensor
    ) -> None:
        """cos_sin: [positions, A] float32; tables: [rows, blocks] int32; yielded: [n] int64, of the step before."""
        self.lane, self.pieces = lane, pieces
        self._device, self._cos_sin, self._tables, self._yielded = device, cos_sin, tables, yielded
        layout = pieces.cache.layout
        self.block_size, self._has_tail = layout.block_size, layout.has_tail
        self.cut_in = pieces.decoder.cut_in(has_tail=layout.has_tail)
        self._buckets: tuple[int, ...] = ()
        self._static: ForwardBuffers | None = None
        self._graphs: dict[tuple[int, int], Callable[[], None]] = {}  # by bucket and piece
        self._libraries = OURS
        self.latents: LatentLibrary | None = None  # of the decodes of this part

    def warm_up(self, max_tokens: int, libraries: PromptLibraries, num_workers: int = 1) -> None:
        """Compile the kernels that a step of up to so many tokens needs, before the first one. Stores nothing.
        libraries: that attend from then on, in what they take. num_workers: see prompt_sizes."""
        most = len(self._cos_sin)
        layers = ((layer.spec, layer.weights) for layer in self.pieces.decoder.layers)
        for num_new, context_len in prompt_sizes(layers, max_tokens, num_workers):
            self._warm_up(min(num_new, most), min(context_len, most))
        embed = self.pieces.decoder.weights.embed
        for num_rows in row_counts([self.pieces.decoder.weights.lm_head]):
            self.lane.run(partial(self.pieces.decoder.own_logits, embed.new_zeros(num_rows, embed.shape[1])))
        if self.pieces.cache.bounds.layers:
            self._warm_up(1, 1, np.ones(1, dtype=np.int32))
        choose_expert_kernels(self.lane, self.pieces.decoder, max_tokens)
        self.lane.record().wait()  # what is compiled above are our kernels, for what libraries do not take
        self._libraries = libraries

    def take_memory(self, max_tokens: int, later_bytes: int) -> None:
        """Compute what takes the most memory: prompts of so many tokens, the most of a step, that end the longest
        contexts, by the libraries that were chosen. Of equal layers one takes as much as all. Stores nothing. All
        ranks, or workers, do it together. later_bytes: that something else will take of the device. Raises
        torch.OutOfMemoryError."""
        most, specs = len(self._cos_sin), [layer.spec for layer in self.pieces.decoder.layers]
        num_whole, left = divmod(max_tokens, most)
        num_new = [left] * (left > 0) + [most] * num_whole
        kept = [torch.empty(later_bytes, dtype=torch.uint8, device=self._device.torch_device)]
        work = _Work(self, self._storing_nothing(num_new, [most] * len(num_new)), PromptRun(len(num_new)), None, None)
        work.launch_through(max(specs.index(spec) for spec in specs) + 2)  # what follows attention comes with the next
        self.lane.record().wait()
        kept.clear()

    def _warm_up(self, num_new: int, context_len: int, sparse: Ints = NO_ROWS) -> None:
        self.run(self._storing_nothing([num_new], [context_len], sparse))

    def _storing_nothing(self, num_new: Sequence[int], context_lens: Sequence[int], sparse: Ints = NO_ROWS) -> Numbers:
        new, contexts = (np.array(of, dtype=np.int32) for of in (num_new, context_lens))
        positions = np.concatenate([np.arange(num, dtype=np.int32) for num in num_new])
        nowhere, ends = np.full_like(positions, -1), positions % self.block_size == self.block_size - 1
        filled = nowhere[ends] if self._has_tail else NO_ROWS
        seqs = contexts, new, new * 0, np.cumsum(new, dtype=np.int32) - 1
        return Numbers(positions * 0, None, positions, nowhere, *seqs, sparse=sparse, filled=filled)

    @property
    def largest_bucket(self) -> int:
        return self._buckets[-1] if self._buckets else 0

    def capture(self, max_tokens: int) -> None:
        """Graphs for up to so many tokens. Raises torch.OutOfMemoryError."""
        buckets = token_buckets(max_tokens)
        if not buckets:
            return
        self._static = ForwardBuffers.static(self.pieces.decoder, buckets[-1], self._device.torch_device)
        self._static.taken = self.pieces.new_taken(buckets[-1])
        for bucket in reversed(buckets):
            buffers = self._static.first(bucket)
            for index in range(self.pieces.num_layers + 1):
                work = partial(self.pieces.compute, buffers, index)
                self._graphs[bucket, index] = self._device.capture(self.lane, work)
        self._buckets = buckets

    def close(self) -> None:
        """Free the graphs; none can be launched any more."""
        self._buckets = ()
        self._graphs.clear()

    def run(
        self,
        numbers: Numbers,
        ends: Sequence[int] = (),
        scorer: PromptScorer | None = None,
        pooler: Pooler | None = None,
        *,
        is_alone: bool = True,
        halves: Halves | None = None,
    ) -> PromptRun:
        """`ends`: of the cache's layers, those after which PromptRun.reached wants an event. `is_alone`: no other graph
        is under way beside it, so that ours may be (see Device.capture). halves: in which it is computed."""
        run = PromptRun(len(numbers.sampled), scorer=scorer, pooler=pooler)
        bucket = bucket_for(self._buckets, numbers.num_tokens) if is_alone else None
        work = _Work(self, numbers, run, bucket, halves)
        for end in ends:
            work.launch_through(self.pieces.through(end))
            self.lane.run(self.pieces.decoder.group.meet)
            run.reached.append((end, self.lane.record()))
        work.launch_through(work.num_layers)
        work.launch_last()
        self.lane.run(work.read)
        return run

    def write(self, numbers: Numbers, bucket: int | None) -> "_Written":
        """Into pinned memory, with idle tokens up to the bucket."""
        num_idle = (bucket or numbers.num_tokens) - numbers.num_tokens

        def padded(column: Ints, value: int) -> Ints:
            return np.concatenate((column, np.full(num_idle, value, dtype=np.int32))) if num_idle else column

        columns = [padded(numbers.token_ids, 0), padded(numbers.positions, 0), padded(numbers.slots, -1)]
        starts = np.concatenate(([0], np.cumsum(numbers.num_new)))
        columns += [numbers.context_lens, starts, numbers.table_rows, numbers.sampled]
        if numbers.previous_rows is not None:
            columns.append(padded(numbers.previous_rows, KNOWN))
        num_sparse = int(numbers.sparse.sum())
        if num_sparse:
            columns.append(numbers.sparse)
        if self._has_tail:
            columns.append(numbers.filled_pairs(self.block_size).ravel())
        sizes = [len(column) for column in columns]
        packed = self._device.pinned((sum(_aligned(size) for size in sizes),), torch.int32)
        for section, column in zip(_sections(packed, sizes), columns, strict=True):
            section.numpy()[:] = column
        return _Written(packed, sizes, bucket, numbers.context_lens.tolist(), numbers.num_new.tolist(), num_sparse > 0)

    def experts_of(self, first: int, end: int) -> Sequence[Layer]:
        """Return the layers whose experts are computed by pieces [first, end): each piece ends the layer before it."""
        return self.pieces.decoder.layers[max(first - 1, 0) : max(end - 1, 0)]

    def begin(self, written: "_Written") -> "_Begun":
        """Device work: what the first piece needs."""
        packed = written.packed.to(self._device.torch_device, non_blocking=True)
        tokens, positions, slots, context_lens, starts, rows, sampled, *previous_rows = _sections(packed, written.sizes)
        filled = previous_rows.pop().long().view(-1, 2) if self._has_tail else None
        flags = previous_rows.pop() if written.has_sparse else None
        tokens = tokens.long()
        if previous_rows:
            from_previous = self._yielded.index_select(0, previous_rows[0].clamp_min(0))
            tokens = torch.where(previous_rows[0] >= 0, from_previous, tokens)
        width = -(-max(written.context_lens) // (self.block_size * TABLE_BLOCKS)) * TABLE_BLOCKS
        paged = PagedBatch(
            self._tables[:, :width].index_select(0, rows),
            context_lens,
            starts,
            host_context_lens=written.context_lens,
            host_num_new=written.num_new,
            num_decodes=written.num_new.count(1),
            block_size=self.block_size,
            library=self._libraries.paged,
            latent_library=self._libraries.latent,
            latents=self.latents,
        )
        buffers = ForwardBuffers.passing(tokens, self._cos_sin.index_select(0, positions), slots.long())
        if written.bucket is not None:
            assert self._static is not None
            passing, buffers = buffers, self._static.first(written.bucket)
            buffers.tokens.copy_(passing.tokens)
            buffers.cos_sin.copy_(passing.cos_sin)
            buffers.slots.copy_(passing.slots)
        else:
            buffers.taken = self.pieces.new_taken(len(tokens))
        sparse = None if flags is None else self._sparse(paged, flags)
        tail = None if filled is None else TailStep(buffers.slots, filled)
        return _Begun(buffers, paged, sampled, sparse, tail)

    def _sparse(self, paged: PagedBatch, flags: Tensor) -> SparseDecodes:
        """flags: [S] int32, see Numbers.sparse."""
        num = paged.num_decodes
        is_sparse, tables = flags[:num] > 0, paged.block_tables[:num]
        contexts = paged.context_lens[:num].masked_fill(~is_sparse, 0)
        return SparseDecodes.of(paged, tables, is_sparse, contexts, self.pieces.cache.bounds.num_chosen)

    def compute(self, buffers: ForwardBuffers, bucket: int | None, index: int) -> InTurns[None]:
        """Device work: a piece."""
        if bucket is None:
            yield from self.pieces.compute_in_turns(buffers, index)
        else:
            self._graphs[bucket, index]()


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """Numbers in pinned memory, with idle tokens up to the bucket."""

    packed: Tensor  # int32
    sizes: list[int]  # of its sections
    bucket: int | None
    context_lens: list[int]
    num_new: list[int]
    has_sparse: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    buffers: ForwardBuffers
    paged: PagedBatch
    sampled: Tensor  # [n] int32
    sparse: SparseDecodes | None  # None: no sequence is sparse
    tail: TailStep | None


class _Forward:
    """Forward pass over some rows, cut at its exchanges. Its methods are device work, in calls one after the other."""

    def __init__(
        self, part: PromptPart, numbers: Numbers, bucket: int | None = None, sampled_alone: Numbers | None = None
    ) -> None:
        """sampled_alone: all that is computed from the attention of the layer Decoder.cut_in on."""
        self._part, self._num_tokens = part, numbers.num_tokens
        self._written = part.write(numbers, bucket) if numbers.num_tokens else None
        self._sampled_alone = None if sampled_alone is None else part.write(sampled_alone, None)
        self.begun: _Begun | None = None  # None: there are no rows

    def layers(self, first: int, end: int) -> InTurns[None]:
        """Compute layers [first, end); after it layers [0, end) have stored their KV."""
        part, written = self._part, self._written
        if written is None:
            yield from part.pieces.decoder.serve_in_turns(part.experts_of(first, end))
            return
        begun = self.begun = self.begun or part.begin(written)
        for index in range(first, end):
            yield from part.compute(begun.buffers, written.bucket, index)
            if index == part.cut_in and self._sampled_alone is not None:
                begun = self.begun = self._cut(begun, self._sampled_alone)
            part.pieces.attend(begun.buffers, index, begun.paged, self._num_tokens, begun.sparse, begun.tail)

    def last(self, num_layers: int) -> InTurns[None]:
        """Compute what is left after so many layers: the end of the last one, and the final norm, or, where nothing is
        read of further layers, the KV of the next."""
        if self._written is None:
            yield from self._part.pieces.decoder.serve_in_turns(self._part.experts_of(num_layers, num_layers + 1))
            return
        assert self.begun is not None
        yield from self._part.compute(self.begun.buffers, self._written.bucket, num_layers)

    def _cut(self, begun: _Begun, sampled_alone: _Written) -> _Begun:
        cut = self._part.begin(sampled_alone)
        cut.buffers.go_on_with(begun.sampled, begun.buffers)
        self._num_tokens = len(begun.sampled)
        return cut


class _Work:
    """Work of a step: a forward pass, or two of half its rows each, and what is read of their results."""

    def __init__(
        self, part: PromptPart, numbers: Numbers, run: PromptRun, bucket: int | None, halves: Halves | None
    ) -> None:
        self._part, self._run, self._numbers, self._halves = part, run, numbers, halves
        # Once the last layer has stored its KV, nobody reads what is made of tokens after which none is sampled.
        is_read = len(numbers.prompt_rows) > 0 or len(numbers.pooled_rows) > 0 or numbers.is_taken
        self.num_layers = part.pieces.num_layers if run.num_sampled or is_read else part.cut_in
        self._num_launched, self._is_over = 0, False
        if halves is not None:
            num_first = first_rows(numbers.num_new.tolist(), halves.num_rows)
            cut = (0, num_first), (num_first, numbers.num_tokens)
            self._passes = [_Forward(part, numbers.between(first, end, part.block_size)) for first, end in cut]
            return
        is_whole = is_read or run.num_sampled == numbers.num_tokens or bucket is not None or len(numbers.sparse) > 0
        is_cut = part.cut_in < self.num_layers and not is_whole
        self._passes = [_Forward(part, numbers, bucket, numbers.sampled_alone() if is_cut else None)]

    def launch_through(self, end: int) -> None:
        """Launch layers up to `end`: of one of which nothing is read, what stores its KV."""
        first, num = self._num_launched, min(end, self.num_layers)
        if first < num:
            self._launch([of.layers(first, num) for of in self._passes], first, num)
            self._num_launched = num
        if end > self.num_layers:
            self.launch_last()

    def launch_last(self) -> None:
        """Launch what is left, after the last layer's attention, unless it was."""
        num = self.num_layers
        if not self._is_over:
            self._launch([of.last(num) for of in self._passes], num, num + 1)
        self._is_over = True

    def _launch(self, works: Sequence[InTurns[None]], first: int, end: int) -> None:
        if self._halves is None:
            self._part.lane.run(partial(finished, works[0]))
        else:
            self._halves.run(self._part.lane, works, self._part.experts_of(first, end))

    def read(self) -> None:
        """Device work: logits of sampled rows, and what else the final hidden states are for."""
        run, decoder = self._run, self._part.pieces.decoder
        begun = [of.begun for of in self._passes if of.begun is not None]
        hidden, device = _whole([of.buffers.hidden for of in begun]), begun[0].buffers.hidden.device
        takens = [of.buffers.taken for of in begun if of.buffers.taken is not None]
        if takens:
            run.taken = _whole(takens)[: self._numbers.num_tokens]
        if run.num_sampled:
            sampled = begun[0].sampled if self._halves is None else sent(self._numbers.sampled, device)
            run.logits = decoder.whole_logits(hidden.index_select(0, sampled))
        for piece in pieces_of(self._numbers.prompt_rows, decoder.spec.vocab_size):
            logits = decoder.logits(hidden.index_select(0, sent(piece, device)))
            if logits is not None and run.scorer is not None:
                run.scorer.add(logits)
        if run.pooler is not None:
            for piece in pieces_of_pooled(self._numbers.pooled_rows):
                run.pooler.add(hidden.index_select(0, sent(piece, device)))


def _whole(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def _sections(packed: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Each at a multiple of 16 bytes: kernels are compiled anew for other addresses."""
    sections: list[Tensor] = []
    start = 0
    for size in sizes:
        sections.append(packed[start : start + size])
        start += _aligned(size)
    return sections


def _aligned(size: int) -> int:
    return -(-size // 4) * 4
