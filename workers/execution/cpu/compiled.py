"""The decoder that a ModelSpec describes, by the compiled CPU kernels. Knows neither sequences nor sampling.

    load: each weight packed as it is read (one copy in memory)  ->  step, into buffers that are reused

Where this rank is the only one a step is one foreign call, or one for each group of layers that somebody watches.
Otherwise each half of a layer is one, and the ranks' parts of the residual are summed after it; those of the embedding
before the first, and of the head's results rank 0 makes the whole.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.cpu.greedy import BEST, TokenMasks
from ....kernels.cpu.layer import CompiledLayers, PackedLayer, PackedOuter, StepMemory
from ....kernels.cpu.library import Team
from ....kernels.cpu.linear import Epilogue, PackedLinear
from ....kernels.elementwise.rms_norm import rms_norm
from ...common.memory import huge_page_mapping
from ...core.runner import LayerWatch
from ...device.key_bounds import NO_BOUNDS
from ...device.kv_cache import KVCache
from ...models.checkpoint.weights import LayerTensors, WeightReader
from ...models.families.spec import LayerSpec, MlpSpec, ModelSpec
from ...models.layers.hidden_states import HiddenStates
from ...models.layers.moe import no_expert_tokens
from ...models.layers.rope import Ropes
from ...models.layers.step import Step
from ...models.plan.compiled_limits import why_not
from ...models.plan.sharding import Share, vocabulary_sizes
from ...parallel.groups import Alone, Group
from ...sampling.prompt_scorer import pieces_of
from .compiled_experts import read_mixture
from .compiled_fields import pack_field
from .compiled_shape import SparseShape, attention_ids, gate_of, shape_of
from .elastic_team import ElasticTeam

ARENA_BYTES = 64 << 20
ALIGNMENT = 64


class Arena:
    """Memory for packed weights: in huge pages they are read faster. What nobody takes costs nothing."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8. Raises ConfigError if the memory is not to be had."""
        padded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if padded > len(self._rest):
            mapping = huge_page_mapping(max(padded, ARENA_BYTES), "use a smaller model, or a machine with more")
            self._rest = torch.frombuffer(mapping, dtype=torch.uint8)
        taken, self._rest = self._rest[:num_bytes], self._rest[padded:]
        return taken


@dataclass(frozen=True, slots=True)
class CompiledWeights:
    layers: list[PackedLayer]
    outer: PackedOuter
    dtype: torch.dtype  # in which the model computes
    sparse: frozenset[int] = frozenset()  # layers that attend sparsely where a step says so, and there are bounds


def read_weights(team: Team, reader: WeightReader, sparse: Collection[int] = ()) -> CompiledWeights:
    """Pack a rank's share. Of what is converted on its way one field at a time is in memory beside its packed form.
    sparse: layers that attend sparsely."""
    arena, spec = Arena(), reader.spec
    kinds = zip(spec.layers, attention_ids(spec, sparse), reader.layers(), strict=True)
    layers = [packed_layer(team, fields, arena, of, attention) for of, attention, fields in kinds]
    return CompiledWeights(layers, _packed_outer(team, reader.outer(), arena), reader.dtype, frozenset(sparse))


def packed_layer(team: Team, fields: LayerTensors, arena: Arena, of: LayerSpec, attention: int) -> PackedLayer:
    """Pack a layer. attention: which of the decoder's."""

    def packed(name: str, *, gated: bool = False) -> PackedLinear:
        return pack_field(team, fields, name, gated=gated, take=arena.take)

    def vector(name: str) -> Tensor | None:
        return fields.tensor(name).float() if fields.has(name) else None

    mlp = of.feed_forward
    is_dense = isinstance(mlp, MlpSpec)
    return PackedLayer(
        input_norm=vector("input_norm"),
        attention_out_norm=vector("attention_out_norm"),
        mlp_norm=vector("mlp_norm"),
        mlp_out_norm=vector("mlp_out_norm"),
        q_norm=vector("q_norm"),
        k_norm=vector("k_norm"),
        sinks=vector("sinks"),
        qkv=packed("qkv"),
        o=packed("o"),
        gate_up=packed("gate_up", gated=True) if is_dense else None,
        down=packed("down") if is_dense else None,
        attention=attention,
        gate=gate_of(mlp) if is_dense else Epilogue.SILU_MUL,
        mixture=None if is_dense else read_mixture(team, fields, mlp, arena.take),
    )


def _packed_outer(team: Team, fields: LayerTensors, arena: Arena) -> PackedOuter:
    """Pack the head; embeddings that are tied to it are read from it, unless it is quantised."""
    norm, is_tied = fields.tensor("norm").float(), not fields.has("lm_head")
    field = "embed" if is_tied else "lm_head"
    head = pack_field(team, fields, field, take=arena.take)
    return PackedOuter(norm, head, None if is_tied else fields.tensor("embed"))


class CompiledDecoder:
    """Decoder of one rank. `memory` holds the input of the next step. All ranks call the same, in the same order:

    step  ->  logits or picked, if rows were sampled  ->  prompt_logits  ->  hidden, of rank 0 alone
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: CompiledWeights,
        cache: KVCache,
        cos_sin: Ropes,
        team: Team,
        group: Group | None = None,
        elastic: ElasticTeam | None = None,
        first_layer: int = 0,
    ) -> None:
        """spec, weights, cache: of this rank's share; the kernels compute it. cos_sin: of each of its ropes. elastic:
        the same team, where its cores change. first_layer: of the cache, that is the first of this decoder's."""
        self._elastic = elastic
        self._group = Alone() if group is None else group
        self._is_split = self._group.size > 1
        assert why_not(spec, self._group.size) is None
        self._vocab_size = spec.vocab_size
        share = Share(self._group.rank, self._group.size)
        bounds = NO_BOUNDS if first_layer else cache.bounds  # which are of the target's layers
        sparse = SparseShape(weights.sparse, bounds.num_chosen)
        shape = shape_of(spec, cos_sin, cache.layout.block_size, weights.dtype, share, sparse)
        self._joined = torch.empty(0, spec.vocab_size)  # of the sampled rows' logits, all ranks' parts
        self._new_memory = partial(StepMemory, team, shape)
        self.memory = self.new_memory()
        layers = [cache.layer(first_layer + i) for i in range(spec.num_layers)]
        # All ranks send the same tokens to the same experts: only the first counts them.
        self.expert_tokens = tokens = None if self._group.rank else no_expert_tokens(spec, torch.device("cpu"))
        kept = tokens, bounds.layers, cache.tail
        self._layers = CompiledLayers(team, shape, weights.layers, weights.outer, layers, *kept)
        self._norm, self._eps = weights.outer.norm, spec.rms_norm_eps
        self._leaves = shape.is_split or shape.leaves_halves  # something for the next layer to add
        self._out_norms = [layer.mlp_out_norm for layer in weights.layers]
        self._hidden_size = spec.hidden_size
        self._columns: list[NDArray[np.int64]] = []  # of what is taken, of each step memory, by number of layers
        self._takes_by_kernel = not (self._is_split or shape.leaves_halves)  # else a residual lacks what is to be added

    def new_memory(self) -> StepMemory:
        """Return further step memory, to be written while a step computes in `memory`."""
        return self._new_memory()

    def step(
        self,
        num_sampled: int,
        watch: LayerWatch | None = None,
        *,
        reads_all: bool,
        picks: bool = False,
        masks: Callable[[], TokenMasks] | None = None,
        taken: HiddenStates | None = None,
    ) -> None:
        """Compute what `memory` holds: the KV of the new tokens into the cache, and the head of the sampled rows. It
        leaves their logits; where it `picks`, their likeliest tokens alone, of those that `masks` allow: it is called
        when the layers are computed, where this rank is the only one. `taken` gets hidden states, of one rank.
        reads_all: `prompt_logits` or `hidden` may follow; else sampled rows ascend, and are alone after the last
        layer."""
        memory, layers = self.memory, self._layers
        if not (reads_all or taken is not None):
            memory.keep(num_sampled)
        if taken is not None and self._takes_by_kernel:
            self._take_by_kernel(taken)
            taken = None
        if watch is None and self._elastic is None and not self._is_split and masks is None and taken is None:
            memory.want(num_sampled, picks=picks)
            layers.step(memory, 0, layers.num_layers)
            return
        memory.want(0, picks=False)
        if self._is_split:
            self._begin_split()
            if taken is not None:
                taken.put(0, self.memory.residual[: self.memory.struct.num_rows])
            self._halves(0, layers.num_layers, watch, taken)
        else:
            watched = (layers.num_layers,) if watch is None else watch.ends
            ends = watched if taken is None else sorted({*watched, *taken.layers} - {0})
            pieces = pairwise((0, *ends)) if self._elastic is None else self._elastic.pieces(ends)
            if taken is not None and 0 in taken.layers:
                layers.step(memory, 0, 0)
                taken.put(0, self.memory.residual[: self.memory.struct.num_rows])
            for first, last in pieces:
                layers.step(memory, first, last)
                if taken is not None:
                    self._take(taken, last)
                if watch is not None and last in watched:
                    watch.reached(last)
        if num_sampled:
            memory.want(num_sampled, picks=picks, masks=masks() if masks is not None else None)
            layers.step(memory, layers.num_layers, layers.num_layers)

    def step_runs(self, num_sampled: int, runs: Iterable[tuple[int, int]]) -> None:
        """Compute what `memory` holds by some of the layers alone, and the logits of the sampled rows, which ascend.
        runs: [first, last) of layers; the first run begins with 0."""
        memory, layers = self.memory, self._layers
        memory.keep(num_sampled)
        memory.want(0, picks=False)
        if self._is_split:
            self._begin_split()
        for first, last in runs:
            if self._is_split:
                self._halves(first, last)
            else:
                layers.step(memory, first, last)
            if self._leaves and last < layers.num_layers:
                self._add_left(last)
        if num_sampled:
            memory.want(num_sampled, picks=False)
            layers.step(memory, layers.num_layers, layers.num_layers)

    def logits(self, num_sampled: int) -> Tensor:
        """Logits of the last step, on rank 0: [num_sampled, vocab] float32, valid until the next step."""
        own, group = self.memory.logits[:num_sampled], self._group
        if group.size == 1:
            return own
        sizes = vocabulary_sizes(self._vocab_size, group.size)
        parts = group.gather(own, [(num_sampled, n) for n in sizes])
        if parts and len(self._joined) < num_sampled:
            self._joined = torch.empty(num_sampled, self._vocab_size)
        return torch.cat(parts, dim=1, out=self._joined[:num_sampled]) if parts else own

    def picked(self, num_sampled: int) -> list[int]:
        """The likeliest tokens of the step before, at rank 0: the first among equals."""
        memory, group = self.memory, self._group
        if group.size == 1:
            return memory.ids[:num_sampled].tolist()
        parts = group.gather(memory.bests[:num_sampled], [(num_sampled, BEST.itemsize)] * group.size)
        if not parts:
            return []
        bests = torch.stack(parts).numpy().view(BEST)[..., 0]
        first_tokens = np.cumsum([0, *vocabulary_sizes(self._vocab_size, group.size)])
        ranks, rows = bests["logit"].argmax(axis=0), np.arange(num_sampled)
        best = bests[ranks, rows]
        ids = first_tokens[ranks] + best["id"]
        return np.where(best["logit"] > -np.inf, ids, 0).tolist()

    def prompt_logits(self, rows: NDArray[np.int32]) -> Iterator[Tensor]:
        """Compute the logits of rows of the previous step that were not sampled, none twice. Yields them in pieces, as
        `logits` does; each piece is valid until the next one."""
        memory, layers = self.memory, self._layers
        for piece in pieces_of(rows, self._vocab_size):
            memory.sampled[: len(piece)] = piece
            memory.want(len(piece), picks=False)
            layers.step(memory, layers.num_layers, layers.num_layers)
            yield self.logits(len(piece))

    def _take_by_kernel(self, taken: HiddenStates) -> None:
        """Have the next step write hidden states of all rows. It is called once a token."""
        memory = self.memory
        if not memory.takes:
            self._begin_to_take(taken)
        memory.taken.rows = taken.space(memory.struct.num_rows)

    def _begin_to_take(self, taken: HiddenStates) -> None:
        memory, to, size = self.memory, self.memory.taken, self._hidden_size
        taken.reserve(size, memory.residual.dtype)
        columns = np.full(self._layers.num_layers + 1, -1, dtype=np.int64)
        columns[list(taken.layers)] = np.arange(len(taken.layers)) * size
        if taken.is_final:
            columns[-1] = 0
        self._columns.append(columns)
        to.columns, to.stride = columns.ctypes.data, max(len(taken.layers), 1) * size
        to.norm = self._norm.data_ptr() if taken.is_normed else None
        memory.takes = True

    def _take(self, taken: HiddenStates, num_layers: int) -> None:
        """Give hidden states of all rows after so many layers."""
        if num_layers in taken.layers:
            taken.put(num_layers, self._residual(num_layers))
        if taken.is_final and num_layers == self._layers.num_layers:
            final = self._residual(num_layers)
            taken.put_final(
                rms_norm(final.float(), self._norm, self._eps).to(final.dtype) if taken.is_normed else final
            )

    def _residual(self, num_layers: int) -> Tensor:
        """[T, H]: residual of all rows after so many layers, of which there is one at least."""
        num_rows = self.memory.struct.num_rows
        return self._with_left(self.memory.residual[:num_rows], slice(num_rows), num_layers)

    def hidden(self, rows: NDArray[np.int32]) -> Tensor:
        """Final hidden states, [len(rows), H] float32, of rows of the previous step whose logits nobody asked for: the
        head would have added to the residual what the last layer left."""
        at = torch.from_numpy(rows.astype(np.int64))
        residual = self._with_left(self.memory.residual[at], at, len(self._out_norms))
        return rms_norm(residual.float(), self._norm, self._eps)

    def _with_left(self, residual: Tensor, rows: Tensor | slice, num_layers: int) -> Tensor:
        """residual: [R, H] of these rows. Adds what the last of so many layers left to be added by the next."""
        out_norm = self._out_norms[num_layers - 1]
        if not (self._is_split or out_norm is not None):
            return residual
        left = self.memory.partial[rows]
        left = left if out_norm is None else rms_norm(left, out_norm, self._eps)
        return (residual.float() + left).to(residual.dtype)

    def _add_left(self, num_layers: int) -> None:
        """Add to the residual what the last of so many layers left, for those after it are skipped, and another layer's
        norm would be taken for what it left."""
        residual, left = (of[: self.memory.struct.num_rows] for of in (self.memory.residual, self.memory.partial))
        if num_layers:
            residual.copy_(self._residual(num_layers))
        left.zero_()

    def take(self, step: Step) -> int:
        """Write a step into `memory`. Returns how many of its rows are sampled."""
        memory, num_seqs = self.memory, len(step.num_new)
        memory.begin(step.num_new, step.context_lens, step.num_tokens, step.tables.shape[1])
        memory.set_tables(np.ascontiguousarray(step.tables), np.arange(num_seqs))
        memory.token_ids[: step.num_tokens] = step.token_ids
        num_sampled = len(step.sampled)
        memory.sampled[:num_sampled] = step.sampled
        memory.set_bounded(step.bounded.tolist())
        if len(step.tails):
            memory.set_tails(step.tails.tolist())
        return num_sampled

    def follow(self, step: Step) -> None:
        """Compute this rank's part of a step that rank 0 broadcast."""
        num_sampled = self.take(step)
        self.step(num_sampled, picks=step.picks, reads_all=step.reads_all)
        if num_sampled:
            self.picked(num_sampled) if step.picks else self.logits(num_sampled)
        for _ in self.prompt_logits(step.prompt_rows):
            pass  # rank 0 has them

    def _begin_split(self) -> None:
        """Embed the tokens, each of which is in one rank's part of the vocabulary."""
        self._layers.step(self.memory, 0, 0)
        residual = self.memory.residual[: self.memory.struct.num_rows]
        residual.copy_(self._group.all_reduce(residual))

    def _halves(
        self, first: int, last: int, watch: LayerWatch | None = None, taken: HiddenStates | None = None
    ) -> None:
        """Compute layers [first, last), half by half."""
        memory, layers = self.memory, self._layers
        ends = watch.ends if watch is not None else ()
        for i in range(first, last):
            layers.half(memory, i, 0)
            self._add_parts()
            if watch is not None and i + 1 in ends:
                watch.reached(i + 1)
            layers.half(memory, i, 1)
            self._add_parts()
            if taken is not None:
                self._take(taken, i + 1)

    def _add_parts(self) -> None:
        """Sum what all ranks have in `partial`, of rows that are still computed: each has stored its KV then."""
        partial = self.memory.partial[: self.memory.struct.num_rows]
        if len(partial):
            partial.copy_(self._group.all_reduce(partial))
        else:
            self._group.meet()
