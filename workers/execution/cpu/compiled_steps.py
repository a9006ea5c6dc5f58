"""Prepares and computes batches with the compiled CPU kernels. Only what changed since the last step is written.

    prepare: write one of two sets of arrays   ->   a function that computes the batch, perhaps on another thread

With two sets a batch is prepared while the previous one is computed; it may continue with the tokens that that one
yields (Batch.previous_entries), which are filled in just before it is computed, beside prompts. At most two are under
way.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ....kernels.cpu.greedy import TokenMasks
from ....kernels.cpu.layer import StepMemory
from ...common.errors import InternalError
from ...core.batch_tables import BatchTables
from ...core.drafting import settle
from ...core.runner import LayerWatch
from ...core.sequence import KNOWN, Batch, DraftEntry, SampledRow, SampledToken, ScheduledSequence, UnsampledChunk
from ...models.layers.hidden_states import HiddenStates
from ...models.layers.step import NO_ROWS, Int32s, Step
from ...ranks.rank_processes import RankProcesses
from ...ranks.step_executor import Compute
from ...sampling.grammar_masks import PendingMasks
from ...sampling.pooled_rows import PooledRows, pieces_of_pooled
from ...sampling.pooler import Pooler
from ...sampling.prompt_rows import PromptRows
from ...sampling.prompt_scorer import PromptScorer
from ...sampling.sampler import Sampler
from ..common.bounded import Bounded
from ..common.tail_blocks import TailBlocks
from .compiled import CompiledDecoder


@dataclass(frozen=True, slots=True)
class _StepArrays:
    """Arrays of one batch."""

    memory: StepMemory
    tables: BatchTables


@dataclass(frozen=True, slots=True)
class _Fed:
    """Input tokens of a batch that the batch before it yields."""

    places: list[int] = field(default_factory=list[int])  # among the batch's input tokens
    rows: list[int] = field(default_factory=list[int])  # among the sampled rows of the batch before


class KeptBeside(NamedTuple):
    """Accounts of what steps keep beside the KV cache."""

    bounded: Bounded
    tail: TailBlocks | None = None


@dataclass(frozen=True, slots=True)
class _Prepared:
    memory: StepMemory
    batch: Batch
    rows: list[SampledRow]  # that are sampled
    sample: Callable[[Tensor], list[SampledToken]] | None  # None: the likeliest token of each is all that is wanted,
    masks: Callable[[], TokenMasks] | None  # of those that these allow
    prompt_rows: PromptRows | None  # whose log-probabilities are due
    pooled: PooledRows | None  # whose hidden states are due
    bounded: SequenceOf[int]  # see Bounded.tokens
    tails: SequenceOf[int]  # see TailBlocks.update
    fed: "_Fed"

    @property
    def read_rows(self) -> tuple[Int32s, Int32s]:
        """Rows that are read besides the sampled ones: of prompts, and pooled ones."""
        prompt_rows, pooled = (NO_ROWS if of is None else of.rows for of in (self.prompt_rows, self.pooled))
        return prompt_rows, pooled


class CompiledSteps:
    def __init__(
        self,
        decoder: CompiledDecoder,
        tables: SequenceOf[BatchTables],
        sampler: Sampler,
        ranks: RankProcesses | None,
        kept: KeptBeside,
        taken: HiddenStates | None = None,
    ) -> None:
        """`tables`: two where a batch is prepared while another is computed. `ranks`: those that compute with us.
        taken: gets what a draft head is given."""
        self._decoder, self._sampler, self._ranks = decoder, sampler, ranks
        self._bounded, self._tail, self._taken = kept.bounded, kept.tail, taken
        self._is_bounded = kept.bounded.budget > 0
        self._block_size = tables[0].block_size
        self._arrays = [_StepArrays(decoder.new_memory() if i else decoder.memory, of) for i, of in enumerate(tables)]
        self._num_prepared = 0
        self._sampled: list[int] = []  # entries of the last batch that are sampled, if another may be prepared after it
        self._yielded: list[int] = []  # by the batch computed last

    def prepare(self, batch: Batch, watch: LayerWatch | None) -> Compute:
        arrays = self._arrays[self._num_prepared % len(self._arrays)]
        self._num_prepared += 1
        fed, positions = _Fed(), list[int]()
        if batch.previous_entries:
            rows = _write_following(arrays, batch, {i: row for row, i in enumerate(self._sampled)}, fed, positions)
        else:
            rows = _write(arrays, batch.entries)
        self._sampled = batch.sampled if len(self._arrays) > 1 else []
        bounded: SequenceOf[int] = ()
        if self._is_bounded:
            bounded = self._bounded.tokens(batch.entries, batch.previous_entries)
            arrays.memory.set_bounded(bounded)
        tails: SequenceOf[int] = ()
        if self._tail is not None:
            tails = self._tail.update(batch.entries, batch.previous_entries)
            arrays.memory.set_tails(tails)
        sample = masks = None
        if self._sampler.is_argmax(rows, with_masks=self._ranks is None):
            pending = self._sampler.begin_masks(rows)
            masks = partial(_token_masks, pending, len(rows)) if pending is not None else None
        else:
            is_ahead = len(batch.previous_entries) > 0
            sample = self._sampler.sample_next(rows, positions) if is_ahead else self._sampler.prepare(rows)
        prompt_rows = PromptRows.of(batch.entries) if batch.prompt_logprobs is not None else None
        pooled = PooledRows.of(batch.entries) if batch.pooled is not None else None
        prepared = _Prepared(arrays.memory, batch, rows, sample, masks, prompt_rows, pooled, bounded, tails, fed)
        return partial(self._compute, prepared, watch)

    @property
    def expert_tokens(self) -> Tensor | None:
        """See layers/moe.py's no_expert_tokens."""
        return self._decoder.expert_tokens

    def profile(self) -> Tensor:
        """Start to profile: the result [len(PARTS)] int64 gains the nanoseconds of each of layer.PARTS from now on.
        Only where batches are computed one by one."""
        assert len(self._arrays) == 1
        return self._decoder.memory.profile()

    def _compute(self, step: _Prepared, watch: LayerWatch | None) -> list[SampledToken]:
        """Raises RankLost; InternalError, where masks are not made in time."""
        picks = step.sample is None
        if self._ranks is not None:
            self._ranks.broadcast(self._shared(step).to_message())
        before, self._yielded = self._yielded, []
        memory, num_sampled = step.memory, len(step.rows)
        if step.fed.rows:
            if not before:
                raise InternalError("the step before this one failed")
            memory.token_ids[step.fed.places] = [before[row] for row in step.fed.rows]
        self._decoder.memory = memory
        if self._taken is not None:
            self._taken.begin(step.batch.entries)
        reads_all, taken = any(map(len, step.read_rows)), self._taken
        self._decoder.step(num_sampled, watch, reads_all=reads_all, picks=picks, masks=step.masks, taken=taken)
        sampled = self._sample(step) if num_sampled else []
        if step.prompt_rows is not None:
            self._score(step.batch, step.prompt_rows)
        if step.pooled is not None:
            self._pool(step.batch, step.pooled)
        return sampled

    def _shared(self, step: _Prepared) -> Step:
        """Return what the other ranks compute of it."""
        prompt_rows, pooled_rows = step.read_rows
        return Step.of(
            step.batch.entries,
            self._block_size,
            picks=step.sample is None,
            prompt_rows=prompt_rows,
            pooled_rows=pooled_rows,
            bounded=step.bounded,
            tails=step.tails,
            is_taken=self._taken is not None,
        )

    def _sample(self, step: _Prepared) -> list[SampledToken]:
        num_sampled = len(step.rows)
        if step.sample is None:
            self._yielded = self._decoder.picked(num_sampled)
            sampled = [SampledToken(row.sequence, of) for row, of in zip(step.rows, self._yielded, strict=True)]
        else:
            sampled = step.sample(self._decoder.logits(num_sampled))
            self._yielded = [token.token_id for token in sampled]
        return settle(step.batch.entries, sampled)

    def _score(self, batch: Batch, rows: PromptRows) -> None:
        """Score prompt rows; last, for it overwrites the sampled rows' logits."""
        scorer = PromptScorer(rows, self._sampler.logsumexp_top_k)
        for logits in self._decoder.prompt_logits(rows.rows):
            scorer.add(logits)
        assert batch.prompt_logprobs is not None
        batch.prompt_logprobs.extend(scorer.results())

    def _pool(self, batch: Batch, rows: PooledRows) -> None:
        """Pool hidden states. All ranks have them: the others do nothing for it."""
        pooler = Pooler(rows)
        for piece in pieces_of_pooled(rows.rows):
            pooler.add(self._decoder.hidden(piece))
        assert batch.pooled is not None
        batch.pooled.extend(pooler.results())


@dataclass(frozen=True, slots=True)
class CompiledStepDecoder:
    """A StepDecoder."""

    decoder: CompiledDecoder
    sampler: Sampler
    runs: SequenceOf[tuple[int, int]] | None = None  # of layers, [first, last), that are computed; None: all

    @property
    def passes(self) -> None:
        """See StepDecoder."""

    def compute(self, step: Step) -> Tensor | None:
        num_sampled = self.decoder.take(step)
        if self.runs is None:
            self.decoder.step(num_sampled, reads_all=step.reads_all)
        else:
            self.decoder.step_runs(num_sampled, self.runs)
        return self.decoder.logits(num_sampled) if num_sampled else None


def runs_between(skipped: SequenceOf[int], num_layers: int) -> list[tuple[int, int]]:
    """Runs of layers, [first, last), without those that are skipped (ascending). The first one begins with layer 0,
    before which tokens are embedded, and may be empty."""
    ends = [*skipped, num_layers]
    starts = [0, *(layer + 1 for layer in skipped)]
    runs = zip(starts, ends, strict=True)
    return [(first, last) for first, last in runs if first < last or first == 0]


def _token_masks(pending: PendingMasks, num_rows: int) -> TokenMasks:
    """Wait for masks of some of the rows."""
    return TokenMasks(num_rows, pending.rows, pending.masks())


def _write(arrays: _StepArrays, entries: SequenceOf[ScheduledSequence]) -> list[SampledRow]:
    """Write a batch; return the rows that are sampled."""
    num_new: list[int] = []
    context_lens: list[int] = []
    token_ids: list[int] = []
    sampled: list[int] = []
    rows: list[SampledRow] = []
    for entry in entries:
        sequence, num = entry.sequence, entry.num_new
        start, known = sequence.num_computed, sequence.token_ids
        end = start + num
        num_new.append(num)
        context_lens.append(end)
        if num == 1:
            token_ids.append(known[start])
        elif isinstance(entry, DraftEntry):
            token_ids += entry.token_ids
            sampled += range(len(token_ids) - num, len(token_ids))
            rows += entry.rows()
            continue
        else:
            token_ids += known[start:end]
        if end == len(known) and type(entry) is not UnsampledChunk:
            sampled.append(len(token_ids) - 1)
            rows.append(sequence)
    memory, tables = arrays.memory, arrays.tables
    width = -(-max(context_lens) // tables.block_size)
    memory.begin(num_new, context_lens, len(token_ids), width)
    table_rows = tables.update(entries)  # which may make another array
    memory.set_tables(tables.array, table_rows)
    memory.token_ids[: len(token_ids)] = token_ids
    memory.sampled[: len(sampled)] = sampled
    return rows


def _write_following(
    arrays: _StepArrays, batch: Batch, row_of: Mapping[int, int], fed: _Fed, positions: list[int]
) -> list[SampledRow]:
    """Write a batch with `previous_entries`; return the rows that are sampled. row_of: by entry of the batch before,
    its row among those that are sampled there. Notes in `fed` the input tokens that come later, and in `positions`
    those of the tokens to be sampled."""
    entries, memory, tables = batch.entries, arrays.memory, arrays.tables
    context_lens: list[int] = []
    token_ids: list[int] = []
    sampled: list[int] = []
    rows: list[SampledRow] = []
    for entry, previous in zip(entries, batch.previous_entries, strict=True):
        sequence, is_fed = entry.sequence, previous != KNOWN
        end = len(sequence.token_ids) + 1 if is_fed else entry.start + entry.num_new
        if is_fed:
            fed.places.append(len(token_ids))
            fed.rows.append(row_of[previous])
            token_ids.append(0)
        else:
            token_ids += sequence.token_ids[entry.start : end]
        context_lens.append(end)
        if is_fed or entry.samples:
            sampled.append(len(token_ids) - 1)
            rows.append(sequence)
            positions.append(end)
    num_new = [entry.num_new for entry in entries]
    memory.begin(num_new, context_lens, len(token_ids), -(-max(context_lens) // tables.block_size))
    table_rows = tables.update(entries, batch.previous_entries)
    memory.set_tables(tables.array, table_rows)
    memory.token_ids[: len(token_ids)] = token_ids
    memory.sampled[: len(sampled)] = sampled
    return rows
