"""A batch computed by the compiled CPU kernels: what changed since the last step is written into arrays that stay."""

from collections.abc import Sequence as SequenceOf
from functools import partial

from torch import Tensor

from .batch_tables import BatchTables
from .launched import Compute
from .models.compiled import CompiledDecoder
from .rank_processes import RankProcesses
from .runner import LayerWatch
from .sampler import Sampler
from .sequence import Batch, SampledToken, ScheduledSequence, Sequence
from .step import Step


class CompiledSteps:
    def __init__(
        self, decoder: CompiledDecoder, tables: BatchTables, sampler: Sampler, ranks: RankProcesses | None
    ) -> None:
        """`ranks`: those that compute with us."""
        self._decoder, self._tables, self._block_size = decoder, tables, tables.block_size
        self._sampler, self._ranks = sampler, ranks

    def prepare(self, batch: Batch, watch: LayerWatch | None) -> Compute:
        return partial(self._compute, batch, self._write(batch.entries), watch)

    def _compute(self, batch: Batch, sequences: list[Sequence], watch: LayerWatch | None) -> list[SampledToken]:
        """`sequences`: those that are sampled. Raises RankLost."""
        if self._ranks is not None:
            self._ranks.tell(Step.of(batch.entries, self._block_size))
        num_sampled, memory, picks = len(sequences), self._decoder.memory, self._sampler.is_argmax(sequences)
        self._decoder.step(num_sampled, watch, picks=picks)
        if not sequences:
            return []
        if picks:
            return [SampledToken(*of) for of in zip(sequences, memory.ids[:num_sampled].tolist(), strict=True)]
        return self._sampler.sample(memory.logits[:num_sampled], sequences)

    def profile(self) -> Tensor:
        """From now on gains the nanoseconds of each of layer.PARTS, [len(PARTS)] int64."""
        return self._decoder.memory.profile()

    def _write(self, entries: SequenceOf[ScheduledSequence]) -> list[Sequence]:
        """Into the decoder's memory. Returns the sequences that are sampled."""
        num_new: list[int] = []
        context_lens: list[int] = []
        token_ids: list[int] = []
        sampled: list[int] = []
        sequences: list[Sequence] = []
        for entry in entries:
            sequence, num = entry.sequence, entry.num_new
            start, known = sequence.num_computed, sequence.token_ids
            end = start + num
            num_new.append(num)
            context_lens.append(end)
            if num == 1:
                token_ids.append(known[start])
            else:
                token_ids += known[start:end]
            if end == len(known):
                sampled.append(len(token_ids) - 1)
                sequences.append(sequence)
        memory = self._decoder.memory
        width = -(-max(context_lens) // self._block_size)
        memory.begin(num_new, context_lens, len(token_ids), width)
        rows = self._tables.update(entries)
        memory.set_tables(self._tables.array, rows)
        memory.token_ids[: len(token_ids)] = token_ids
        memory.sampled[: len(sampled)] = sampled
        return sequences
