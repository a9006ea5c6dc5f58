"""The decoder that a ModelSpec describes. Knows tensors; knows neither sequences nor sampling.

    residual = embedding
    each layer:  residual += attention(enter(residual));  residual += feed forward(enter(residual))
                 [residual += what it is given of each token;  residual *= its scale]
    logits = head(norm(residual))

What enters a part is normed where the spec has norms before it; what it adds, where it has them after it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, tanh
from torch.nn import functional
from torch.nn.functional import embedding

from ....kernels.gemm.linear import linear
from ...device.kv_cache import KVCache
from ...parallel.groups import Alone, Group
from ...sampling.pooled_rows import pieces_of_pooled
from ...sampling.prompt_scorer import pieces_of
from ..checkpoint.weights import DecoderWeights
from ..families.spec import ModelSpec, MoeSpec
from ..plan.expert_placement import Placement
from ..plan.sharding import Share, vocabulary_sizes
from .attention import StepMeta
from .dispatch import ExpertRanks
from .hidden_states import HiddenStates
from .layer import Layer, LayerRows, RowsCut, enter, layers_of, mixture, run_layers
from .moe import no_expert_tokens
from .rope import Ropes
from .row_exchange import RowExchange
from .step import Step
from .token_inputs import token_inputs
from .turns import InTurns, finished


class Decoder:
    """Decoder of one rank. All ranks call the same methods, in the same order."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        group: Group | None = None,
        experts: Mapping[int, Placement] | None = None,
        peers: Group | RowExchange | None = None,
        first_kv: int = 0,
    ) -> None:
        """spec, weights: of this rank's share. experts: Share.experts. peers: workers that have those together, each
        with tokens of its own; None: the ranks of `group` have them. first_kv: layer of the cache that is the first of
        this decoder's."""
        self.spec, self.weights = spec, weights
        self.group = Alone() if group is None else group
        # All ranks send the same tokens to the same experts: only the first counts them.
        device = weights.embed.device
        self.expert_tokens = no_expert_tokens(spec, device) if self.group.rank == 0 else None
        self.exchange = peers if isinstance(peers, RowExchange) else None
        holders, is_over = (self.group, False) if peers is None else (peers, True)
        ranks = {layer: ExpertRanks(holders, of, device, is_over=is_over) for layer, of in (experts or {}).items()}
        layers = layers_of(spec, weights.layers, self.expert_tokens, ranks)
        self.layers = [replace(layer, kv_id=first_kv + layer.kv_id) for layer in layers] if first_kv else layers
        self.rope_dims = [dim for _, dim in spec.ropes]  # found by comparing layers: not once a step
        # Layers that store KV, and those whose experts are spread, which all who hold them meet in, are for all tokens.
        for_all = [i for i, of in enumerate(self.layers) if of.spec.kv_from is None or of.experts is not None]
        self.num_for_all = for_all[-1] + 1

    def without(self, skipped: Collection[int]) -> "Decoder":
        """Return a decoder of the same weights without some of the layers; it counts no expert's tokens. Not for models
        whose layers read another one's KV, or an input of each token."""
        assert all(of.spec.kv_from is None and of.spec.token_input is None for of in self.layers)
        made = copy(self)
        kept = [of for i, of in enumerate(self.layers) if i not in skipped]
        made.layers, made.num_for_all = [replace(of, expert_tokens=None) for of in kept], len(kept)
        return made

    def compute(
        self,
        step: Step,
        cache: KVCache,
        cos_sin: Ropes,
        stored: Callable[[int], object] = lambda _: None,
        add_prompt_logits: Callable[[Tensor], object] = lambda _: None,
        add_pooled: Callable[[Tensor], object] = lambda _: None,
        taken: HiddenStates | None = None,
    ) -> Tensor | None:
        """A step whose sequences with one new token come first; stores its KV in `cache`. Returns the logits of its
        sampled rows at rank 0, None where there are none and elsewhere. `add_prompt_logits` gets those of its prompt
        rows at rank 0, `add_pooled` the final hidden states of its pooled rows at all ranks, a piece at a time. taken:
        gets hidden states of all rows.

        `stored` is told how many of the cache's layers were asked to store theirs, after each. Once the last of these
        has stored its KV, sampled rows are computed alone: nobody reads what layers would make of the others.
        """

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(cos_sin[0].device, non_blocking=True)

        sampled, meta = tensor(step.sampled), step.meta(cos_sin, cache.layout.block_size, cache.bounds.num_chosen)
        cut = None if step.reads_all or taken is not None else self._cut(step, sampled, meta, cache, cos_sin)
        rows = self._through(tensor(step.token_ids), cache, meta, stored, taken, cut)
        residual, hidden = rows.residual, rows.hidden
        if taken is not None and taken.is_final:
            left = None if hidden is None else hidden.clone()
            norm = self.weights.norm if taken.is_normed else None
            taken.put_final(enter(left, residual.clone(), norm, self.spec.rms_norm_eps))

        def at(rows: Tensor) -> tuple[Tensor, Tensor | None]:
            return residual[rows], None if hidden is None else hidden[rows]

        for piece in pieces_of(step.prompt_rows, self.spec.vocab_size):
            prompt_logits = self._head(*at(tensor(piece)))
            if prompt_logits is not None:
                add_prompt_logits(prompt_logits)
        for piece in pieces_of_pooled(step.pooled_rows):
            add_pooled(self._normed(*at(tensor(piece))))
        if not len(sampled):
            return None
        return self._head(*(at(sampled) if cut is None else (residual, hidden)))

    def cut_in(self, *, has_tail: bool) -> int:
        """Return the layer in which rows that nobody reads may be left out, once KV is stored: the last that is for
        all, unless its experts are, or it rounds blocks of a KV tail as it attends. The number of layers: none."""
        last = self.layers[self.num_for_all - 1]
        return self.num_for_all - (last.experts is None and not has_tail)

    def _cut(self, step: Step, sampled: Tensor, meta: StepMeta, cache: KVCache, cos_sin: Ropes) -> RowsCut | None:
        """Return the cut after which only sampled rows are computed; None: all rows are computed in all layers. meta:
        of the step."""
        layer, block_size = self.cut_in(has_tail=len(cache.tail) > 0), cache.layout.block_size
        if layer == len(self.layers) or len(step.bounded):  # the bounds are not those of sampled rows alone
            return None
        if len(sampled):
            meta = step.sampled_alone(block_size).meta(cos_sin, block_size)
        return RowsCut(layer, sampled, meta)

    def serve(self) -> None:
        """A step of `peers` in which there are no tokens here: theirs may come to our experts."""
        finished(self.serve_in_turns(self.layers))

    def serve_in_turns(self, layers: Sequence[Layer]) -> InTurns[None]:
        """Do what `serve` does, in some layers."""
        nothing = self.weights.embed.new_empty(0, self.weights.embed.shape[1])
        slots = torch.empty(0, dtype=torch.int64, device=nothing.device)
        for layer in layers:
            if layer.experts is not None and isinstance(spec := layer.spec.feed_forward, MoeSpec):
                yield from mixture(spec, layer, nothing, slots, nothing)

    def forward(self, token_ids: Tensor, cache: KVCache, meta: StepMeta, taken: HiddenStates | None = None) -> Tensor:
        """token_ids: [T] int64. Stores their KV in `cache`; returns the final hidden states of all, [T, H]. taken: gets
        hidden states of all rows."""
        rows = self._through(token_ids, cache, meta, taken=taken)
        normed = self._normed(rows.residual, rows.hidden)
        if taken is not None and taken.is_final:
            taken.put_final(normed if taken.is_normed else rows.residual)
        return normed

    def _through(
        self,
        token_ids: Tensor,
        cache: KVCache,
        meta: StepMeta,
        stored: Callable[[int], object] = lambda _: None,
        taken: HiddenStates | None = None,
        cut: RowsCut | None = None,
    ) -> LayerRows:
        """Compute the layers. token_ids: [T] int64. See run_layers."""
        residual = self.embed(token_ids)
        rows = LayerRows(residual, meta, self.token_inputs(token_ids, residual))
        return run_layers(self.layers, rows, cache, self.group, stored, taken, cut)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids: [T] int64. Returns [T, H]."""
        scale, found = self.spec.embedding_scale, self._looked_up(token_ids, self.weights.embed, self.spec.vocab_size)
        return found if scale == 1.0 else found * found.new_full((), scale)  # is rounded, as transformers does

    def token_inputs(self, token_ids: Tensor, embedded: Tensor) -> Tensor | None:
        """token_ids: [T] int64; embedded: [T, H], what `embed` returns. What layers are given of them, [T, layers, P];
        None: nothing."""
        spec, weights = self.spec.token_input, self.weights
        if spec is None:
            return None
        assert weights.token_embed is not None
        looked_up = self._looked_up(token_ids, weights.token_embed, spec.vocab_size)
        return token_inputs(self.spec, weights, looked_up, embedded)

    def _head(self, residual: Tensor, hidden: Tensor | None) -> Tensor | None:
        """residual: [R, H], of any rows, overwritten; hidden: [R, H], what is to be added to it yet. See `logits`."""
        return self.logits(self._normed(residual, hidden))

    def _normed(self, residual: Tensor, hidden: Tensor | None) -> Tensor:
        """residual, hidden: as `_head` has them. Returns the final hidden states, [R, H]."""
        return enter(hidden, residual, self.weights.norm, self.spec.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """hidden: [R, H]. Returns [R, vocab] float32 at rank 0, None on other ranks."""
        whole = self.whole_logits(hidden)
        return None if whole is None else whole.float()

    def whole_logits(self, hidden: Tensor) -> Tensor | None:
        """hidden: [R, H]. Returns [R, vocab] of hidden's dtype at rank 0, None on other ranks."""
        own, group = self.own_logits(hidden), self.group
        if group.size == 1:
            return own
        parts = group.gather(own, [(len(own), n) for n in vocabulary_sizes(self.spec.vocab_size, group.size)])
        return torch.cat(parts, dim=1) if parts else None

    def own_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, H]. Returns those of this rank's part of the vocabulary, [R, n], of hidden's dtype."""
        head, cap = self.weights.lm_head, self.spec.logit_softcap
        own = functional.linear(hidden, head) if isinstance(head, Tensor) else linear(hidden, head)
        return tanh(own / cap) * cap if cap else own

    def _looked_up(self, token_ids: Tensor, table: Tensor, vocab_size: int) -> Tensor:
        """token_ids: [T]; table: [n, W], this rank's part of `vocab_size` rows. Returns [T, W]."""
        group = self.group
        if group.size == 1:
            return embedding(token_ids, table)
        local = token_ids - Share(group.rank, group.size).vocabulary(vocab_size).start
        is_others = (local < 0) | (local >= len(table))
        return group.all_reduce(embedding(local.masked_fill(is_others, 0), table).masked_fill_(is_others[:, None], 0))
