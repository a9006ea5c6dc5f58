"""A Runner that a person can compute by hand, with a real KV memory.

The KV of a token is its id, stored in the slot of every layer as K (and its position as V). The next token is the sum
of the ids that are *read back* from the sequence's blocks, each from one of the layers in turn, modulo the vocabulary,
so a block or a layer that was lost, reused or moved wrongly gives a wrong token. So does KV of another model: what is
stored is the id and the model's `weights`, a number. Token 0 ends a sequence. Where a
grammar does not allow a token, the next id that it allows follows instead (and 0 after the last). Draft layers, which a
subclass may have, are stored like the others, and not read.
"""

import mmap
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..common.prompt_logprobs import PromptLogprobs
from ..common.request import SamplingParams
from ..core.embedding import EmbeddingSpec, Pooling
from ..core.runner import LayerWatch, ModelInfo
from ..core.sequence import Batch, SampledToken
from ..kv.layout import KVLayout, Region
from ..kv.memory import KVMemory
from ..sampling.grammar_masks import GrammarMasks
from .fake_stream import FakeRow, FakeStep, FakeStream


def fake_next(token_ids: list[int], vocab_size: int) -> int:
    """The token that follows `token_ids`."""
    return sum(token_ids) % vocab_size


def next_allowed(token_id: int, mask: npt.NDArray[np.int32], vocab_size: int) -> int:
    """The first id from `token_id` on, and from 0 after the last, whose bit of the mask is set."""
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab_size))
    return int(allowed[np.searchsorted(allowed, token_id) % len(allowed)])


def fake_output(prompt: list[int], max_tokens: int, vocab_size: int = 1000, weights: int = 0) -> list[int]:
    """Output of a fake worker for `prompt`: at most `max_tokens` ids, ending with the first 0."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens and (len(ids) == len(prompt) or ids[-1] != 0):
        ids.append(fake_next([token_id + weights for token_id in ids], vocab_size))
    return ids[len(prompt) :]


def fake_prompt_logprobs(
    read: list[int], prompt: SequenceOf[int], first: int, end: int, num_top: int, vocab_size: int = 1000
) -> PromptLogprobs:
    """Return a fake worker's log-probabilities of `prompt`'s tokens [first, end), having read these ids: a token that
    is n ids after the likeliest has the rank n + 1 and the log-probability -n."""
    likeliest = np.array([fake_next(read[:position], vocab_size) for position in range(first, end)])
    after = (np.array(prompt[first:end]) - likeliest) % vocab_size
    top = np.tile(np.arange(num_top), (end - first, 1))
    return PromptLogprobs(
        first,
        -after.astype(np.float32),
        after.astype(np.int32) + 1,
        ((likeliest[:, None] + top) % vocab_size).astype(np.int32),
        -top.astype(np.float32),
    )


def fake_hidden(read: SequenceOf[int]) -> list[float]:
    """Hidden state of the last of some tokens: its id, their number, the sum of their ids, and 1."""
    return [float(read[-1]), float(len(read)), float(sum(read)), 1.0]


class FakeRunner:
    """`num_blocks` blocks of `block_size` slots; `step_s` seconds of pretended compute a step, which may be changed."""

    num_draft_layers: int = 0  # after `num_layers` others
    draft_id: str = ""
    weights: int = 0  # of the model, which a subclass may change

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        vocab_size: int = 1000,
        max_context: int = 512,
        step_s: float = 0.0,
        num_layers: int = 1,
        looks_ahead: bool = False,
        pooling: Pooling = Pooling.LAST,
    ) -> None:
        """`looks_ahead`: as a device whose steps take their input from the previous step; at most two are in flight."""
        max_context = min(max_context, num_blocks * block_size)
        embedding = EmbeddingSpec(4, pooling, may_be_cut=True)
        self.info = ModelInfo("fake", "FakeForCausalLM", vocab_size, max_context, (0,), "float32", embedding=embedding)
        num_layers += self.num_draft_layers
        model_id = f"fake-{self.weights}" if self.weights else "fake"
        layout = KVLayout("float32", block_size, num_layers, num_kv_heads=1, head_dim=1, model_id=model_id)
        self.layout = replace(layout, num_draft_layers=self.num_draft_layers, draft_id=self.draft_id)
        self.step_s, self.num_steps = step_s, 0  # steps: that were computed
        self._looks_ahead = looks_ahead
        self.stream = FakeStream(self._compute, GrammarMasks(vocab_size, self.info.eos_token_ids))
        self._buffer = mmap.mmap(-1, num_blocks * self.layout.block_bytes)
        # [block, layer, kv, slot] int32: the layout's axes with its single head and dimension left out.
        shape = (num_blocks, num_layers, 2, block_size)
        self._kv: npt.NDArray[np.int32] = np.frombuffer(self._buffer, np.int32).reshape(shape)
        region = Region(self._kv.ctypes.data, len(self._buffer), memoryview(self._buffer))
        self.memory = KVMemory(self.layout, num_blocks, region)

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> FakeStep:
        return self.stream.launch(batch, watch)

    def expert_tokens(self) -> npt.NDArray[np.int64] | None:
        return None

    @property
    def proposer(self) -> None:
        return None

    @property
    def has_borrowed_cores(self) -> bool:
        return False

    def takes_input_from_previous(self, sampling: SamplingParams) -> bool:
        return self._looks_ahead

    def _compute(self, step: FakeStep) -> list[SampledToken]:
        if self.step_s:
            time.sleep(self.step_s)
        self.num_steps += 1
        watch = step.watch
        for layer in range(self.layout.num_layers):
            self._store(step, layer)
            if watch is not None and layer + 1 in watch.ends:
                watch.reached(layer + 1)
        if step.prompt_logprobs is not None:
            step.prompt_logprobs += [(row.sequence, self._score(row)) for row in step.rows if row.prompt_end]
        if step.pooled is not None:
            step.pooled += [(row.sequence, self._pool(row)) for row in step.rows if row.num_pooled]
        sampling = [row for row in step.rows if row.samples]
        tokens = [self._sample(row) for row in sampling]
        for i, mask in (step.masks or {}).items():
            token_id = next_allowed(tokens[i].token_id, mask, self.info.vocab_size)
            tokens[i] = replace(tokens[i], token_id=token_id)
        return tokens

    def _store(self, step: FakeStep, layer: int) -> None:
        for row in step.rows:
            for position in range(row.start, len(row.token_ids)):
                block, slot = self._slot(row, position)
                self._kv[block, layer, :, slot] = row.token_ids[position] + self.weights, position

    def _sample(self, row: FakeRow) -> SampledToken:
        logprob = None if row.sequence.request.sampling.logprobs is None else 0.0
        return SampledToken(row.sequence, fake_next(self._read(row), self.info.vocab_size), logprob)

    def _score(self, row: FakeRow) -> PromptLogprobs:
        request, first, end = row.sequence.request, row.prompt_first, row.prompt_end
        num_top, vocab_size = request.sampling.prompt_logprobs or 0, self.info.vocab_size
        return fake_prompt_logprobs(self._read(row), request.prompt_token_ids, first, end, num_top, vocab_size)

    def _pool(self, row: FakeRow) -> npt.NDArray[np.float64]:
        read = self._read(row)
        ends = range(len(read) - row.num_pooled + 1, len(read) + 1)
        return np.sum([fake_hidden(read[:end]) for end in ends], axis=0)

    def _read(self, row: FakeRow) -> list[int]:
        """Token ids that the KV of a sequence holds."""
        read: list[int] = []
        for position in range(len(row.token_ids)):
            block, slot = self._slot(row, position)
            read.append(int(self._kv[block, position % self.layout.num_target_layers, 0, slot]))
        return read

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        def copy() -> None:
            for source, target in pairs:
                self._kv[target] = self._kv[source]

        self.stream.queue(copy)

    def check(self) -> None:
        """Do nothing: no rank can be lost."""

    def close(self) -> None:
        """Do nothing: transports may still hold views of the memory, which ends with the process."""

    def _slot(self, row: FakeRow, position: int) -> tuple[int, int]:
        return row.table[position // self.layout.block_size], position % self.layout.block_size
