"""Batches computed on a device that nobody waits for: launched, and later asked for their tokens.

    launch (host)   one room is written: tokens, contexts, what changed in block tables, how to sample
    main lane       upload ── decode graph ──────────────────────────────┬── sample ── read back ──> tokens
    prompt lane             └─ prompts, layer by layer, if there are any ─┘

    a step of decodes        one graph from tokens to logits, one that samples, each of the smallest bucket that fits
    a small one with prompts all of it on the prompt lane, the pieces between attention as graphs (prompt_part.py)
    a large one              its decodes as a graph, its prompts beside them
    without graphs           all on the prompt lane, launched kernel by kernel

Whatever is sampled is sampled at once, on the main lane, and stays on the device as what the next step continues with
(Batch.fed_by). The main lane has all steps in order; the prompt lane begins after what is on it, and is waited for.
"""

from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.block_copy import copy_blocks
from ..errors import ConfigError, InternalError
from ..kv_cache import KVCache
from ..models import mla
from ..models.decoder import Decoder
from ..models.rope import Ropes
from ..models.spec import KVShape, LatentSpec, LayerSpec, ModelSpec
from ..runner import LayerWatch
from ..sequence import Batch, SampledToken, ScheduledSequence
from .decode_graphs import DecodeGraphs
from .device import Device, Event
from .device_errors import is_full, lost, needing_memory, of_step
from .device_sampler import DeviceSampler
from .device_tables import DeviceTables
from .expert_tokens import ExpertTokens
from .flow import Pieces
from .prompt_part import TABLE_BLOCKS, Numbers, PromptPart, PromptRun
from .step_buffers import KNOWN, NUM_ROOMS, Room, StepBuffers

GRAPH_TOKENS = 512  # of a step with prompts whose pieces are graphs: beyond, a layer takes longer than its launches


@dataclass(frozen=True, slots=True)
class _Rows:
    """A step's entries, column by column."""

    entries: SequenceOf[ScheduledSequence]
    table_rows: list[int]
    context_lens: list[int]  # with the new tokens
    feeds: list[int]  # where in the tokens of the step before each one's token is, or KNOWN
    sampled: list[int]  # entries that are sampled

    @property
    def all_decode(self) -> bool:
        return len(self.sampled) == len(self.entries) and all(e.num_new == 1 for e in self.entries)


class GpuSteps:
    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        cache: KVCache,
        ropes: Ropes,
        sampler: DeviceSampler,
        max_sequences: int,
        *,
        graph_tokens: int | None = GRAPH_TOKENS,
    ) -> None:
        """ropes: on the device. max_sequences: of a batch. graph_tokens: None: no graphs.

        Raises ConfigError where the device has too little memory.
        """
        layout, cos_sin = cache.layout, torch.cat(ropes, dim=1)
        self._device, self._cache, self._sampler = device, cache, sampler
        self._main, prompt_lane = device.lane("main", high_priority=True), device.lane("prompts")
        pieces = Pieces(decoder, cache)
        remedy = "lower kv_memory_fraction (or kv_memory_bytes) or max_running, or set cuda_graphs to false"
        with needing_memory("the buffers and graphs of steps", remedy):
            max_blocks = -(-layout.num_blocks_for(len(cos_sin)) // TABLE_BLOCKS) * TABLE_BLOCKS
            self._buffers = StepBuffers(device, max_sequences, max_blocks, decoder.spec.vocab_size)
            self._tables = DeviceTables(device, layout.block_size, max_blocks, max_sequences)
            self._prompts = PromptPart(device, prompt_lane, pieces, cos_sin, self._tables.tensor, self._buffers.tokens)
            self._graphs = DecodeGraphs(pieces, cos_sin, self._buffers, sampler)
            device.synchronize()  # what was allocated on no lane of ours is there
            self._main.run(sampler.warm_up)
            self._prompts.warm_up()
            if graph_tokens is not None:
                self._graphs.capture(device, self._main)
                self._prompts.capture(graph_tokens)
            device.synchronize()
        counts = decoder.expert_tokens
        self._expert_tokens = ExpertTokens(device, self._main, counts) if counts is not None else None
        self._num_launched = 0
        self._sampled_rows: list[int] = []  # of each entry of the last batch, its row among the tokens; else KNOWN
        self._gathered: tuple[list[int], int] | None = None  # table rows that the decode graphs' tables are, and bucket

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> "LaunchedStep":
        """See Runner.launch. Raises OutOfDeviceMemory or DeviceLost."""
        with self._recovering():
            return self._launch(batch, watch)

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """See Runner.copy_blocks: in the order of steps. Raises as `launch` does."""
        if not pairs:
            return
        with self._recovering():
            ids = self._device.pinned((2, len(pairs)), torch.int64)
            ids.numpy()[:] = np.array(pairs).T
            self._main.run(partial(_copy, self._cache.by_block, ids))

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
        with suppress(RuntimeError):  # a lost device was told of already
            self._device.synchronize()

    def _launch(self, batch: Batch, watch: LayerWatch | None) -> "LaunchedStep":
        index = self._num_launched % NUM_ROOMS
        room = self._buffers.rooms[index]
        room.wait()
        if len(batch.entries) > self._buffers.max_rows:
            raise InternalError(f"a step of {len(batch.entries)} sequences: there are buffers for max_running")
        self._num_launched += 1
        rows = self._rows(batch)
        sequences = [batch.entries[i].sequence for i in rows.sampled]
        positions = [rows.context_lens[i] for i in rows.sampled]
        self._sampler.write(index, sequences, positions)
        if self._tables.send(self._main):
            self._gathered = None
        num_decodes, run = self._num_in_graph(batch, rows, watch), None
        bucket = self._graphs.bucket(num_decodes) if num_decodes else None
        if num_decodes < len(rows.entries):
            self._prompts.lane.after(self._main.record())
            ends = watch.ends if watch is not None else ()
            run = self._prompts.run(self._numbers(rows, num_decodes), ends, is_alone=bucket is None)
        if bucket is not None:
            self._main.run(self._decode(room, rows, num_decodes, bucket))
        if run is not None:
            self._main.after(self._prompts.lane.record())
        is_plain = self._sampler.is_capturable(sequences)
        self._main.run(partial(self._finish, index, len(sequences), num_decodes, run, is_plain))
        room.used = self._main.record()
        return LaunchedStep(self._recovering, self._sampler, room, index, len(sequences), run, watch)

    def _rows(self, batch: Batch) -> _Rows:
        entries, fed_by = batch.entries, batch.fed_by
        table_rows = self._tables.update(entries, is_fed=bool(fed_by))
        if fed_by:
            context_lens = [len(e.sequence.token_ids) + 1 for e in entries]
            feeds, sampled = [self._sampled_rows[i] for i in fed_by], list(range(len(entries)))
        else:
            context_lens = [e.sequence.num_computed + e.num_new for e in entries]
            feeds, sampled = [KNOWN] * len(entries), [i for i, e in enumerate(entries) if e.samples]
        self._sampled_rows = [KNOWN] * len(entries)
        for row, i in enumerate(sampled):
            self._sampled_rows[i] = row
        return _Rows(entries, table_rows, context_lens, feeds, sampled)

    def _num_in_graph(self, batch: Batch, rows: _Rows, watch: LayerWatch | None) -> int:
        """How many entries, the first ones, a decode graph computes."""
        if rows.all_decode:
            num = len(rows.entries)
        elif watch is None and batch.num_tokens > self._prompts.largest_bucket:
            num = batch.num_decodes
        else:  # who watches is told of all tokens' layers
            num = 0
        return num if num and self._graphs.bucket(num) is not None else 0

    def _decode(self, room: Room, rows: _Rows, num: int, bucket: int) -> partial[None]:
        """Writes the room for the first entries; what computes them."""
        entries, table_rows = rows.entries[:num], rows.table_rows[:num]
        tokens = [
            0 if feed >= 0 else e.sequence.token_ids[e.sequence.num_computed]
            for e, feed in zip(entries, rows.feeds, strict=False)
        ]
        room.write(tokens, rows.feeds[:num], rows.context_lens[:num], table_rows, bucket)
        is_gathered = self._gathered == (table_rows, bucket)
        self._gathered = table_rows, bucket
        return partial(self._compute_decodes, room, bucket, is_gathered)

    def _compute_decodes(self, room: Room, bucket: int, is_gathered: bool) -> None:
        """Device work."""
        self._buffers.upload(room)
        if not is_gathered:
            self._buffers.gather_tables(self._tables.tensor, bucket)
        self._graphs.forward(bucket)

    def _finish(self, index: int, num_sampled: int, first: int, run: PromptRun | None, is_plain: bool) -> None:
        """Device work: tokens of all that is sampled. first: row of the logits where those of `run` go."""
        buffers = self._buffers
        if not num_sampled:
            return
        if run is not None and run.logits is not None:
            buffers.logits[first : first + run.num_sampled].copy_(run.logits)
        if is_plain:
            self._graphs.choose(num_sampled, index)
        else:
            self._sampler.upload(index)
            self._sampler.change_and_choose(index, buffers.logits[:num_sampled], buffers.tokens[:num_sampled])
        buffers.read_back(buffers.rooms[index])

    def _numbers(self, rows: _Rows, first: int) -> Numbers:
        """Of the entries from `first` on."""
        of = sorted(range(first, len(rows.entries)), key=lambda i: rows.entries[i].num_new > 1)
        entries, block_size = [rows.entries[i] for i in of], self._cache.layout.block_size
        context_lens = np.array([rows.context_lens[i] for i in of], dtype=np.int32)
        num_new = np.array([e.num_new for e in entries], dtype=np.int32)
        ends = np.cumsum(num_new)
        tokens: list[int] = []
        slots: list[np.ndarray] = []
        positions = [np.arange(end - num, end) for end, num in zip(context_lens, num_new, strict=True)]
        for i, entry, position in zip(of, entries, positions, strict=True):
            sequence, start = entry.sequence, int(position[0])
            tokens += [0] if rows.feeds[i] >= 0 else sequence.token_ids[start : start + entry.num_new]
            first_block = start // block_size
            blocks = np.array(sequence.block_table[first_block : int(position[-1]) // block_size + 1])
            slots.append(blocks[position // block_size - first_block] * block_size + position % block_size)
        last = dict(zip(of, (ends - 1).tolist(), strict=True))
        feeds = np.array([rows.feeds[i] for i in of], dtype=np.int32)
        return Numbers(
            np.array(tokens, dtype=np.int32),
            feeds if (feeds >= 0).any() else None,  # then each has one new token
            np.concatenate(positions),
            np.concatenate(slots),
            context_lens,
            num_new,
            np.array([rows.table_rows[i] for i in of], dtype=np.int32),
            np.array([last[i] for i in rows.sampled if i >= first], dtype=np.int32),
        )

    @contextmanager
    def _recovering(self) -> Generator[None]:
        """Where it fails in the middle, nothing of it is under way any more, and nothing is relied on."""
        try:
            yield
        except Exception as e:
            self._tables.forget_all()
            self._sampler.forget()
            self._gathered = None
            self.close()
            if (named := of_step(e)) is not None:
                raise named from e
            raise


def check_known(spec: ModelSpec) -> None:
    """Raise ConfigError for a decoder that the GPU's kernels cannot compute."""
    for layer in spec.layers:
        for what in _unknown(layer, spec.kv):
            raise ConfigError(f"the CUDA engine does not know {what} yet ({spec.architecture}): use device cpu")


def _unknown(layer: LayerSpec, kv: KVShape) -> Iterator[str]:
    attention = layer.attention
    if isinstance(attention, LatentSpec):
        if not mla.has_kernels(attention):
            yield "latents and heads of sizes other than powers of 2 from 16 on"
    elif (attention.head_dim, attention.num_kv_heads) != (kv.dim, kv.num_heads):
        yield "heads that differ from layer to layer"
    yield from layer.by_torch_alone()


class LaunchedStep:
    """See Launched."""

    def __init__(
        self,
        recovering: Callable[[], AbstractContextManager[None]],
        sampler: DeviceSampler,
        room: Room,
        index: int,
        num_sampled: int,
        run: PromptRun | None,
        watch: LayerWatch | None,
    ) -> None:
        self._recovering, self._sampler, self._room = recovering, sampler, room
        self._index, self._num_sampled = index, num_sampled
        self._run, self._watch = run, watch  # the run is kept: lanes use its memory

    def tokens(self) -> list[SampledToken]:
        """Raises OutOfDeviceMemory or DeviceLost."""
        with self._recovering():
            reached = dict(self._run.reached) if self._run is not None else dict[int, Event]()
            for end in self._watch.ends if self._watch is not None else ():
                if end in reached:
                    reached[end].wait()
                else:
                    self._room.wait()
                assert self._watch is not None
                self._watch.reached(end)
            self._room.wait()
        return self._sampler.sampled(self._index, self._room.tokens[: self._num_sampled].tolist())

    def abandon(self) -> None:
        try:
            self._room.wait()
        except RuntimeError:
            return  # nobody wants to know


def _copy(pools: SequenceOf[Tensor], ids: Tensor) -> None:
    of, to = ids.to(pools[0].device, non_blocking=True)
    for pool in pools:
        copy_blocks(pool, pool, of, to)
