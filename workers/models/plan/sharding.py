"""Division of a decoder among a worker's ranks. Arithmetic only, no torch.

Query heads, KV heads and the MLP's inner dimension are divided evenly, in order; where there are more ranks than KV
heads, neighbouring ranks hold the same one (kv/layout.py says which). So is the vocabulary of embedding and head: where
it does not divide some ranks hold a row more than others, and nothing is padded. Norms are everybody's. Of a mixture's
experts each rank holds its part of every one, or some of them, whole.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...common.errors import ConfigError
from ...config.worker_config import WorkerConfig
from ..families.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from .expert_placement import Placement, place_experts
from .tensor_names import Cut, Piece, Pieces, Shape, layer_tensors


@dataclass(frozen=True, slots=True)
class Share:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1
    experts: Mapping[int, Placement] | None = None  # by layer; None: ranks share each expert
    data_rank: int | None = None  # of the placement's ranks, where those are workers; None: `rank`

    @property
    def expert_rank(self) -> int:
        return self.rank if self.data_rank is None else self.data_rank

    def part_of(self, length: int) -> slice:
        """Its part of an axis that is divided over the ranks."""
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def vocabulary(self, vocab_size: int) -> slice:
        """Its token ids: vocab_size / size of them, rounded up or down."""
        return slice(self.rank * vocab_size // self.size, (self.rank + 1) * vocab_size // self.size)


WHOLE = Share()
ADDED_ONCE = ("o_bias", "down_bias")  # fields of LayerWeights


def vocabulary_sizes(vocab_size: int, size: int) -> list[int]:
    """Return how many tokens of the vocabulary each of `size` ranks has."""
    parts = [Share(rank, size).vocabulary(vocab_size) for rank in range(size)]
    return [part.stop - part.start for part in parts]


def share_of(config: WorkerConfig, spec: ModelSpec) -> Share:
    """Return the share of a worker, of its rank 0 where it has several. Raises ConfigError where the model cannot be
    shared so."""
    how = config.parallel
    peer_group, placement = how.peer_group, how.expert_placement
    if peer_group is not None:
        return share_of_worker(spec, peer_group.rank, peer_group.size, placement, how.expert_copies)
    is_whole = how.expert_parallel > 1
    return share_of_first(spec, how.tensor_parallel, placement if is_whole else None, how.expert_copies)


def share_of_first(spec: ModelSpec, size: int, placement: str | None = None, num_copies: int = 0) -> Share:
    """Share of rank 0 of `size`. placement: which experts each has whole, see place_experts; None: a part of every one.
    Raises ConfigError where ranks cannot share the model so."""
    check_divides(spec, size, whole_experts=placement is not None)
    return Share(0, size, None if placement is None else place_experts(spec, size, placement, num_copies))


def share_of_worker(spec: ModelSpec, rank: int, size: int, placement: str, num_copies: int = 0) -> Share:
    """Return the share of worker `rank` of `size` that share experts alone, whole ones. placement: see place_experts.
    Raises ConfigError."""
    return Share(0, 1, place_experts(spec, size, placement, num_copies, "data_parallel"), data_rank=rank)


def check_divides(spec: ModelSpec, size: int, *, whole_experts: bool = False) -> None:
    """Raise ConfigError unless `size` ranks can share a decoder of `spec`; whole_experts: not each of its experts."""
    for fault in _faults(spec, size, whole_experts):
        most = max(layer.attention.num_heads for layer in spec.layers)
        fitting = ", ".join(str(n) for n in range(1, most + 1) if not any(_faults(spec, n, whole_experts)))
        raise ConfigError(f"tensor_parallel={size} does not divide the model's {fault}: use one of {fitting}")
    if spec.vocab_size < size:
        raise ConfigError(
            f"tensor_parallel={size} leaves some ranks none of the model's {spec.vocab_size} tokens: use fewer ranks"
        )


def _faults(spec: ModelSpec, size: int, whole_experts: bool) -> Iterator[str]:
    """List what `size` ranks cannot share evenly."""
    for layer in dict.fromkeys(spec.layers):
        attention = layer.attention
        if attention.num_heads % size:
            yield f"{attention.num_heads} attention heads"
        if isinstance(attention, AttentionSpec):
            num = attention.num_kv_heads
            if num % size and size % num:
                yield f"{num} key-value heads, nor they it"
        of = layer.feed_forward
        for part in layer.mlps:
            is_whole = whole_experts and isinstance(of, MoeSpec) and part is of.expert
            if part.intermediate_size % size and not is_whole:
                yield f"intermediate size of {part.intermediate_size}"


def spec_of(spec: ModelSpec, share: Share) -> ModelSpec:
    """The spec of the layers that `share` holds: its heads, its part of the MLP. The vocabulary stays whole."""
    shares = {layer: _layer_of(layer, share) for layer in dict.fromkeys(spec.layers)}
    return replace(spec, layers=tuple(shares[layer] for layer in spec.layers))


def _layer_of(layer: LayerSpec, share: Share) -> LayerSpec:
    attention, mlp, size = layer.attention, layer.feed_forward, share.size
    num_heads = attention.num_heads // size
    if isinstance(attention, AttentionSpec):
        attention = replace(attention, num_heads=num_heads, num_kv_heads=max(attention.num_kv_heads // size, 1))
    else:
        attention = replace(attention, num_heads=num_heads)
    beside = layer.beside and _mlp_of(layer.beside, share)
    return replace(layer, attention=attention, feed_forward=_feed_forward_of(mlp, share), beside=beside)


def _feed_forward_of(whole: MlpSpec | MoeSpec, share: Share) -> MlpSpec | MoeSpec:
    if isinstance(whole, MlpSpec):
        return _mlp_of(whole, share)
    expert = _mlp_of(whole.expert, share) if share.experts is None else whole.expert
    return replace(whole, expert=expert, shared=whole.shared and _mlp_of(whole.shared, share))


def _mlp_of(whole: MlpSpec, share: Share) -> MlpSpec:
    return replace(whole, intermediate_size=whole.intermediate_size // share.size)


def part_of_piece(piece: Piece, share: Share) -> tuple[slice, ...]:
    """Return the part of a piece that `share` holds, as an index of its `own_shape`."""
    shape = piece.own_shape
    match piece.cut:
        case Cut.WHOLE:
            return (slice(None),)
        case Cut.HEADS | Cut.INNER:
            return (share.part_of(shape[0]),)
        case Cut.VOCABULARY:
            return (share.vocabulary(shape[0]),)
        case Cut.HEAD_INPUTS | Cut.INNER_INPUTS:
            return slice(None), share.part_of(shape[1])
        case Cut.KV_HEADS:
            num_heads = piece.num_kv_heads
            dim = shape[0] // num_heads
            first, num = share.rank * num_heads // share.size, max(num_heads // share.size, 1)
            return (slice(first * dim, (first + num) * dim),)


def shape_of_part(piece: Piece, share: Share) -> Shape:
    """Shape of what `share` holds of a piece."""
    shape, part = piece.own_shape, part_of_piece(piece, share)
    return tuple(len(range(n)[of]) for n, of in zip(shape, part, strict=False)) + shape[len(part) :]


def stored_part(piece: Piece, share: Share) -> tuple[int | slice, ...]:
    """Return the part that a share holds, as an index of the tensor as stored."""
    shape, part = piece.own_shape, list(part_of_piece(piece, share))
    part += [slice(None)] * (len(shape) - len(part))
    left = iter(part[::-1] if piece.transposed else part)
    at = (*piece.at, *(slice(None),) * (len(piece.shape) - len(piece.at)))
    return tuple(
        of if isinstance(of, int) else _within(range(n)[of], next(left)) for n, of in zip(piece.shape, at, strict=True)
    )


def rows_and_inputs(piece: Piece, share: Share) -> tuple[tuple[int, ...], slice, slice]:
    """Return the same part of a weight as its index among those that stand in one tensor, outputs, and inputs."""
    part = stored_part(piece, share)
    index = tuple(of for of in part if isinstance(of, int))
    first, last = (of for of in part if isinstance(of, slice))
    return (index, last, first) if piece.transposed else (index, first, last)


def _within(places: range, part: slice) -> slice:
    """Select `part` of `places`, as a slice of the original."""
    left = places[part]
    return slice(left.start, left.stop, left.step)


def layer_fields(spec: ModelSpec, layer: int, share: Share) -> dict[str, Pieces]:
    """Return the fields of a layer that `share` holds parts of. Rank 0 adds what is added once; whoever holds an expert
    adds its bias."""
    fields = layer_tensors(spec, layer)
    for field in ADDED_ONCE if share.rank else ():
        fields.pop(field, None)
    if share.experts is not None and layer in share.experts:
        held = share.experts[layer].held[share.expert_rank]
        return {field: tuple(_of_experts(pieces, held)) for field, pieces in fields.items()}
    if share.rank:
        fields.pop("experts_down_bias", None)
    return fields


def _of_experts(pieces: Pieces, held: tuple[int, ...]) -> Iterator[Piece]:
    """Yield the pieces without those of experts other than `held`, which are whole."""
    for piece in pieces:
        if piece.expert is None:
            yield piece
        elif piece.expert in held:
            yield replace(piece, cut=Cut.WHOLE)
