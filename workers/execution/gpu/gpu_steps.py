"""Batches computed on GPUs that nobody waits for: planned and launched, and later asked for their tokens.

    launch (host)   one set of host buffers is written: tokens, contexts, what changed in block tables, how to sample
    each rank       computes what was planned (rank_steps.py), on its own GPU

    a step of decodes        one graph from tokens to logits, one that samples, each of the smallest bucket that fits;
                             the rows of drafts are rows as any other
    a small one with prompts all of it on the prompt lane, the pieces between attention as graphs (prompt_part.py)
    a large one              its decodes as a graph, its prompts beside them (of several ranks: after them)
    without graphs           all on the prompt lane, launched kernel by kernel
    with workers that share experts: the first where all have nothing but decodes, else the last

Whatever is sampled is sampled at once, on rank 0's main lane, and stays on the devices as what the next step continues
with (Batch.previous_entries). Only a step with rows that follow a grammar is sampled when the host has their masks
(LaunchedStep.sample), which it makes while the logits are computed; nothing is launched in between.
"""

from collections.abc import Generator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import numpy as np
from numpy.typing import NDArray

from ....kernels.sampling.logsumexp import logsumexp_top_k
from ...common.errors import InternalError, RankLost
from ...common.request import SamplingParams
from ...core.drafting import settle
from ...core.runner import LayerWatch
from ...core.sequence import KNOWN, Batch, DraftEntry, IsHere, SampledToken, Sequence, everybody
from ...device.device import Event, Lane
from ...device.device_errors import is_full, lost, of_step
from ...device.expert_tokens import ExpertTokens
from ...ranks.agreed_step import StepSize
from ...ranks.device_peers import DevicePeers
from ...ranks.rank_processes import RankProcesses
from ...sampling.pooled_rows import PooledRows
from ...sampling.pooler import Pooler
from ...sampling.prompt_rows import PromptRows
from ...sampling.prompt_scorer import PromptScorer
from ..common.bounded import Bounded
from ..common.entry_rows import EntryRows, decode_columns, decode_tails, inputs_of, is_of_decodes
from ..common.tail_blocks import TailBlocks
from .device_sampler import DeviceSampler
from .device_tables import ChangedTables
from .key_bounds_part import missing
from .prompt_part import PromptRun
from .rank_steps import RankSteps
from .step_buffers import NUM_HOST_BUFFERS
from .step_plan import NO_ROWS, NOTHING, Numbers, StepPlan, copy_message


class GpuSteps:
    """A Backend. With `peers` it computes AgreedSteps alone."""

    def __init__(
        self,
        own: RankSteps,
        sampler: DeviceSampler,
        ranks: RankProcesses | None = None,
        peers: DevicePeers | None = None,
    ) -> None:
        """own: rank 0's, which samples with `sampler`. ranks: the others. peers: workers that share experts."""
        self._own, self._device, self._sampler, self._ranks = own, own.device, sampler, ranks
        self._peers = peers
        limits, counts = own.limits, own.expert_tokens
        self._block_size = limits.block_size
        self._tables = ChangedTables(self._block_size, limits.table_shape[1], own.buffers.sizes.max_sequences)
        self._bounded = Bounded(own.sparse_budget, self._block_size)
        self._tail = TailBlocks(limits.num_tail_blocks, self._block_size) if limits.num_tail_blocks else None
        self._expert_tokens = ExpertTokens(own.device, own.main, counts) if counts is not None else None
        self._num_launched = 0
        self._sampled_rows: list[int] = []  # of each entry of the last batch, its row among the tokens; else KNOWN
        self._waiting: LaunchedStep | None = None  # the last step, while it waits for its masks

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> "LaunchedStep":
        """See Runner.launch. Raises OutOfDeviceMemory, DeviceLost or RankLost."""
        return self.launch_agreed(batch, watch, None)

    def launch_agreed(self, batch: Batch, watch: LayerWatch | None, step: StepSize | None) -> "LaunchedStep":
        """See AgreedSteps. step: None: no other worker takes part."""
        with self.recovering(is_told=False):
            index = self._num_launched % NUM_HOST_BUFFERS
            plan, prompt_rows, pooled = self._plan(batch, watch, index, step)
            scorer = None if prompt_rows is None else PromptScorer(prompt_rows, logsumexp_top_k)
            pooler = None if pooled is None else Pooler(pooled)
        with self.recovering():
            if self._ranks is not None:
                self._ranks.broadcast(plan.to_message())
            run = self._own.run(plan, index, scorer, pooler, step)
            launched = LaunchedStep(self, self._own, self._sampler, index, plan, run, watch, batch)
            if self._sampler.has_masks(index):
                self._own.hold(index)
                self._waiting = launched
            else:
                launched.finish()
        return launched

    def size_of(self, batch: Batch) -> StepSize:
        """See AgreedSteps."""
        return StepSize(batch.num_tokens, has_prompts=not is_of_decodes(batch.entries, batch.sampled))

    def serve(self, step: StepSize) -> None:
        """See AgreedSteps."""
        with self.recovering():
            index = self._num_launched % NUM_HOST_BUFFERS
            self._own.buffers.host[index].wait()
            self._num_launched += 1
            self._own.run(NOTHING, index, step=step)
            self._own.hold(index)

    def leave(self) -> None:
        """See AgreedSteps."""
        if self._peers is not None:
            self._peers.leave()

    @property
    def main(self) -> Lane:
        """See AgreedSteps."""
        return self._own.main

    @property
    def has_borrowed_cores(self) -> bool:
        return False

    @property
    def turns(self) -> None:
        return None

    def takes_input_from_previous(self, sampling: SamplingParams) -> bool:
        return True

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """See Runner.copy_blocks: in the order of steps. Raises as `launch` does."""
        if not pairs:
            return
        with self.recovering():
            if self._ranks is not None:
                self._ranks.broadcast(copy_message(pairs))
            self._own.copy_blocks(np.array(pairs, dtype=np.int32).T)

    def expert_tokens(self) -> NDArray[np.int64] | None:
        """See Runner.expert_tokens: as of some steps ago."""
        return self._expert_tokens.latest() if self._expert_tokens is not None else None

    def check(self) -> None:
        """Raises DeviceLost."""
        try:
            self._device.check()
        except RuntimeError as e:
            if (device_lost := lost(e)) is not None:
                raise device_lost from e
            if not is_full(e):
                raise

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.abandon()
        if self._ranks is not None:
            self._ranks.close()
        self._settle()
        self._own.close()
        if self._peers is not None:
            self._peers.close()

    def check_ranks(self) -> None:
        """Raise RankLost if a rank, or a worker that shares experts, was lost, whatever error the device reports for
        that."""
        if self._ranks is not None:
            self._ranks.check()
        if self._peers is not None:
            self._peers.check()

    @contextmanager
    def recovering(self, *, is_told: bool = True) -> Generator[None]:
        """End the work in flight if the body fails, and raise the error by its name. is_told: other ranks know of the
        work."""
        try:
            with self.waiting():
                yield
            self.check_ranks()
        except Exception as e:
            self._waiting = None  # what was launched is dropped
            if self._ranks is not None and (is_told or isinstance(e, RankLost)):
                # The ranks are in a step, and it is unknown how far they have computed it.
                why = e if isinstance(e, RankLost) else RankLost(f"rank 0 failed in a step ({of_step(e) or e})")
                failed = self._ranks.fail(why)
                self._settle()
                if failed is e:
                    raise
                raise failed from e
            self.leave()  # the other workers wait in this step, and our device for them
            self._tables.forget_all()
            self._bounded.forget_all()
            self._sampler.forget()
            self._own.forget()
            self._settle()
            self.check_ranks()
            if (named := of_step(e)) is not None:
                raise named from e
            raise

    def waiting(self) -> AbstractContextManager[None]:
        """Bound the time for which the code within waits for other ranks, or workers."""
        others = self._ranks or self._peers
        return nullcontext() if others is None else others.waiting()

    def sample(self, step: "LaunchedStep", is_here: IsHere) -> None:
        """Sample a step if it waits for its masks. Raises as `launch` does, and InternalError for masks that are not
        made."""
        if self._waiting is step:
            with self.recovering():
                self._sampler.make_masks(step.index, is_here)
                self._waiting = None
                step.finish()

    def drop(self, step: "LaunchedStep") -> None:
        """Sample a step that nobody wants any more, if it waits for its masks and other ranks for its tokens."""
        if self._waiting is step and self._ranks is not None:
            self.sample(step, _nobody)

    def _settle(self) -> None:
        with suppress(RuntimeError, RankLost), self.waiting():  # a lost device or rank has already been reported
            self._device.synchronize()

    def _plan(
        self, batch: Batch, watch: LayerWatch | None, index: int, step: StepSize | None
    ) -> tuple[StepPlan, PromptRows | None, PooledRows | None]:
        """Plan a step that uses host buffers `index`, and write there how its rows are sampled."""
        self._own.buffers.host[index].wait()
        self._check_size(batch)
        self._num_launched += 1
        rows = self._rows(batch)
        sampled, positions = rows.next_tokens
        previous_rows = [rows.previous_rows[i] for i in rows.sampled] if batch.previous_entries else ()
        is_plain = self._sampler.write(index, sampled, positions, previous_rows)
        num_decodes = self._num_in_graph(batch, rows, watch, step)
        has_prompts = num_decodes < len(rows.entries)
        prompts = [rows.entries[i] for i in rows.in_order(num_decodes)]
        if self._own.taken is not None:
            self._own.taken.begin([*rows.entries[:num_decodes], *prompts])
        prompt_rows = None if batch.prompt_logprobs is None else PromptRows.of(prompts)
        pooled = None if batch.pooled is None else PooledRows.of(prompts)
        plan = StepPlan(
            self._tables.take(),
            decode_columns(rows, num_decodes),
            self._numbers(rows, num_decodes, prompt_rows, pooled) if has_prompts else None,
            tuple(watch.ends) if watch is not None and has_prompts else (),
            len(sampled),
            is_plain,
            missing(rows.entries, rows.context_lens, rows.bounded, self._block_size),
            decode_tails(rows, num_decodes, self._block_size),
        )
        return plan, prompt_rows, pooled

    def _check_size(self, batch: Batch) -> None:
        """Raise InternalError for a step that the buffers cannot hold."""
        sizes, num_drafted = self._own.buffers.sizes, sum(len(entry.draft) for entry in batch.drafts)
        if len(batch.entries) > sizes.max_sequences:
            raise InternalError(f"a step of {len(batch.entries)} sequences, but the buffers hold max_running")
        if len(batch.entries) + num_drafted > sizes.max_rows:
            raise InternalError(f"a step that drafts {num_drafted} tokens, but the buffers hold {sizes.max_rows} rows")

    def _rows(self, batch: Batch) -> EntryRows:
        entries, previous_entries = batch.entries, batch.previous_entries
        table_rows = self._tables.update(entries, previous_entries)
        sampled = batch.sampled
        if previous_entries:
            pairs = zip(entries, previous_entries, strict=True)
            context_lens = [e.start + e.num_new if i == KNOWN else len(e.sequence.token_ids) + 1 for e, i in pairs]
            previous_rows = [KNOWN if i == KNOWN else self._sampled_rows[i] for i in previous_entries]
        else:
            context_lens = [e.sequence.num_computed + e.num_new for e in entries]
            previous_rows = [KNOWN] * len(entries)
        self._sampled_rows = [KNOWN] * len(entries)
        if not batch.drafts:  # after them no step is launched ahead
            for row, i in enumerate(sampled):
                self._sampled_rows[i] = row
        bounded = self._bounded.tokens(entries, previous_entries)
        tails = [] if self._tail is None else self._tail.by_entry(entries, previous_entries)
        return EntryRows(entries, table_rows, context_lens, previous_rows, sampled, bool(batch.drafts), bounded, tails)

    def _num_in_graph(self, batch: Batch, rows: EntryRows, watch: LayerWatch | None, step: StepSize | None) -> int:
        """Number of entries, from the first, that a decode graph computes."""
        if step is not None:
            return len(rows.entries) if self._own.graph_of(step) is not None else 0
        if rows.all_decode:
            num = len(rows.entries)
        elif watch is None and batch.num_tokens > self._own.prompts.largest_bucket:
            num = batch.num_decodes + (batch.num_runs if len(batch.drafts) == batch.num_runs else 0)
        else:  # a watcher is informed about all tokens' layers
            num = 0
        return num if num and self._own.graphs.bucket(rows.num_rows(num)) is not None else 0

    def _numbers(
        self, rows: EntryRows, first: int, prompt_rows: PromptRows | None, pooled: PooledRows | None
    ) -> Numbers:
        """Arrays of the entries from `first` on."""
        of = rows.in_order(first)
        order = np.array(of, dtype=np.intp)
        num_new = np.array([e.num_new for e in rows.entries], dtype=np.int32)[order]
        previous_rows = np.array(rows.previous_rows, dtype=np.int32)[order].repeat(num_new)
        ends = np.empty(len(rows.entries), dtype=np.int32)
        ends[order] = np.cumsum(num_new)
        tokens, positions, slots = inputs_of(rows, of, self._block_size)
        sampled = ends[[i for i in rows.sampled if i >= first]] - 1
        if rows.has_drafts:
            each = [(ends[i], rows.entries[i]) for i in rows.sampled if i >= first]
            spans = [np.arange(end - (e.num_new if isinstance(e, DraftEntry) else 1), end) for end, e in each]
            sampled = np.concatenate(spans, dtype=np.int32) if spans else NO_ROWS
        return Numbers(
            tokens,
            previous_rows if (previous_rows >= 0).any() else None,
            positions,
            slots,
            np.array(rows.context_lens, dtype=np.int32)[order],
            num_new,
            np.array(rows.table_rows, dtype=np.int32)[order],
            sampled,
            NO_ROWS if prompt_rows is None else prompt_rows.rows,
            NO_ROWS if pooled is None else pooled.rows,
            np.array(rows.sparse(of), dtype=np.int32) if rows.bounded else NO_ROWS,
            rows.filled(of, self._block_size),
            is_taken=self._own.taken is not None,
        )


def _nobody(_sequence: Sequence) -> bool:
    return False


class LaunchedStep:
    """See InFlightStep."""

    def __init__(
        self,
        steps: GpuSteps,
        own: RankSteps,
        sampler: DeviceSampler,
        index: int,
        plan: StepPlan,
        run: PromptRun | None,
        watch: LayerWatch | None,
        batch: Batch,
    ) -> None:
        self._steps, self._own, self._sampler = steps, own, sampler
        self.index, self._plan, self._host = index, plan, own.buffers.host[index]
        self._run, self._watch = run, watch  # the run is kept: lanes use its memory
        self._batch = batch

    def finish(self) -> None:
        """Launch what chooses its tokens."""
        self._own.finish(self._plan, self.index, self._run)

    def sample(self, is_here: IsHere) -> None:
        """Raises OutOfDeviceMemory, DeviceLost, RankLost or InternalError."""
        self._steps.sample(self, is_here)

    def tokens(self) -> list[SampledToken]:
        """Raises OutOfDeviceMemory, DeviceLost or RankLost."""
        self.sample(everybody)
        with self._steps.recovering():
            reached = dict(self._run.reached) if self._run is not None else dict[int, Event]()
            for end in self._watch.ends if self._watch is not None else ():
                if end in reached:
                    reached[end].wait()
                else:
                    self._host.wait()
                self._steps.check_ranks()
                assert self._watch is not None
                self._watch.reached(end)
            self._host.wait()
            prompt_logprobs, pooled = self._batch.prompt_logprobs, self._batch.pooled
            if prompt_logprobs is not None and self._run is not None and self._run.scorer is not None:
                prompt_logprobs.extend(self._run.scorer.results())
            if pooled is not None and self._run is not None and self._run.pooler is not None:
                pooled.extend(self._run.pooler.results())
        sampled = self._sampler.sampled(self.index, self._host.tokens[: self._plan.num_sampled].tolist())
        return settle(self._batch.entries, sampled) if self._batch.drafts else sampled

    def abandon(self) -> None:
        with suppress(RuntimeError, RankLost), self._steps.waiting():  # errors do not matter here
            self._steps.drop(self)
            self._host.wait()
