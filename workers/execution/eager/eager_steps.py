"""Computes batches with torch's own operators: the reference of compiled_steps.py, and the fallback."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...core.drafting import rows_of, settle
from ...core.runner import LayerWatch
from ...core.sequence import Batch, SampledToken, Sequence
from ...device.kv_cache import KVCache
from ...models.layers.decoder import Decoder
from ...models.layers.hidden_states import HiddenStates
from ...models.layers.rope import Ropes
from ...models.layers.step import Step
from ...parallel.groups import Group
from ...ranks.rank_processes import RankProcesses
from ...ranks.step_executor import Compute
from ...sampling.pooled_rows import PooledRows
from ...sampling.pooler import Pooler
from ...sampling.prompt_rows import PromptRows
from ...sampling.prompt_scorer import PromptScorer
from ...sampling.sampler import Sampler
from ..common.bounded import Bounded
from ..common.tail_blocks import tail_blocks_of


class EagerSteps:
    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        cos_sin: Ropes,
        sampler: Sampler,
        ranks: RankProcesses | None,
        peers: Group | None = None,
        taken: HiddenStates | None = None,
    ) -> None:
        """cos_sin: on the device that computes. `ranks`: those that compute with us; peers: those that the decoder
        shares experts with. taken: gets what a draft head is given."""
        self._decoder, self._cache, self._cos_sin = decoder, cache, cos_sin
        self._sampler, self._ranks, self._peers, self._taken = sampler, ranks, peers, taken
        self._device = cache.tensor.device
        self._bounded = Bounded(cache.bounds.budget, cache.layout.block_size)
        self._tail = tail_blocks_of(cache)

    @property
    def expert_tokens(self) -> Tensor | None:
        return self._decoder.expert_tokens

    def prepare(self, batch: Batch, watch: LayerWatch | None) -> Compute:
        return partial(self._compute, batch, watch)

    @torch.inference_mode()
    def serve(self) -> None:
        """Compute a step without a batch of this worker's own, for the workers that share experts."""
        self._decoder.serve()

    def leave(self) -> None:
        """Leave the workers that share experts: their current step fails. Idempotent."""
        if self._peers is not None:
            self._peers.close()

    def _compute(self, batch: Batch, watch: LayerWatch | None) -> list[SampledToken]:
        """Raises RankLost."""
        # Attention wants sequences with one new token first; order is restored by sampling in the batch's own order.
        entries = sorted(batch.entries, key=lambda entry: entry.num_new > 1)
        prompt_rows = PromptRows.of(entries if batch.prompt_logprobs is not None else ())
        pooled = PooledRows.of(entries if batch.pooled is not None else ())
        block_size = self._cache.layout.block_size
        bounded = self._bounded.tokens(entries)
        tails = self._tail.update(entries) if self._tail is not None else ()
        step = Step.of(
            entries,
            block_size,
            prompt_rows=prompt_rows.rows,
            pooled_rows=pooled.rows,
            bounded=bounded,
            tails=tails,
            is_taken=self._taken is not None,
        )
        if self._ranks is not None:
            self._ranks.broadcast(step.to_message())
        scorer, pooler = PromptScorer(prompt_rows, self._sampler.logsumexp_top_k), Pooler(pooled)
        sample = self._sampler.prepare(rows_of(entries))
        stored = self._stored(watch)
        if self._taken is not None:
            self._taken.begin(entries)
        logits = self._decoder.compute(step, self._cache, self._cos_sin, stored, scorer.add, pooler.add, self._taken)
        if batch.prompt_logprobs is not None:
            batch.prompt_logprobs.extend(scorer.results())
        if batch.pooled is not None:
            batch.pooled.extend(pooler.results())
        if logits is None:
            return []
        sampled: dict[Sequence, list[SampledToken]] = {}
        for token in settle(entries, sample(logits)):
            sampled.setdefault(token.sequence, []).append(token)
        return [token for entry in batch.entries if entry.samples for token in sampled[entry.sequence]]

    def _stored(self, watch: LayerWatch | None) -> Callable[[int], None]:
        """Return a callback that reports to `watch` the layers it waits for, once the device has stored them."""
        ends = set(watch.ends if watch else ())

        def stored(num_layers: int) -> None:
            if watch is not None and num_layers in ends:
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
                watch.reached(num_layers)

        return stored


@dataclass(frozen=True, slots=True)
class EagerStepDecoder:
    """A StepDecoder."""

    decoder: Decoder
    cache: KVCache
    cos_sin: Ropes
    sampler: Sampler

    @property
    def passes(self) -> None:
        """See StepDecoder."""

    @torch.inference_mode()
    def compute(self, step: Step) -> Tensor | None:
        return self.decoder.compute(step, self.cache, self.cos_sin)
