"""Checks whether KV can move between two layouts, of which the peer's may hold anything: it was received. No torch."""

from collections import Counter
from dataclasses import fields

from ...proto import kv_pb2
from ..common.errors import LayoutMismatch
from .dtypes import GROUP, KIVI, dim_multiple, is_known
from .layout import AXIS_ORDERS, DOT, KEY_AND_VALUE, LARGEST, PACKINGS, ROWS, SCALES_LAST, KVLayout, Shape

MUST_AGREE = ("model_id", "num_target_layers", "num_kv_heads", "head_dim", "num_vectors")  # the rest is converted
WHOLE_BLOCKS = (GROUP, ROWS, KEY_AND_VALUE)  # slots, packing and vectors of blocks that are rounded as a whole
MAX_FAULTS = 16  # that an error names
MAX_SHOWN_CHARS = 64  # of a name in an error


def check_bridge(ours: KVLayout, peer: KVLayout) -> None:
    """Raise LayoutMismatch, showing the two layouts side by side, unless KV can move between them, converted where they
    differ. `peer` may hold anything."""
    faults = [
        f"{name}: {_shown(ours, name)} here, {_shown(peer, name)} there"
        for name in MUST_AGREE
        if getattr(ours, name) != getattr(peer, name)
    ] + _faults(peer)
    if (ours.has_tail or peer.has_tail) and not faults and (ours.block_size % GROUP or peer.block_size % GROUP):
        sizes = f"block_size: {ours.block_size} here, {peer.block_size} there"
        faults.append(f"{sizes}: both must be multiples of {GROUP}, the tokens that {KIVI} rounds together")
    if not faults and (ours.layer_shapes or peer.layer_shapes):
        pairs = [(ours.shape_of(i), peer.shape_of(i)) for i in range(ours.num_target_layers)]
        faults = [f"layer {i}: heads x dim {_by(a)} here, {_by(b)} there" for i, (a, b) in enumerate(pairs) if a != b]
    if faults:
        rows = "; ".join(f"{f.name} {_shown(ours, f.name)} | {_shown(peer, f.name)}" for f in fields(ours))
        raise LayoutMismatch(
            f"KV cannot move between these two workers ({'; '.join(faults[:MAX_FAULTS])}): serve one checkpoint "
            f"with settings that both support. Here | there: {rows}"
        )


def check_received(ours: KVLayout, peer: kv_pb2.KVLayout) -> None:
    """Check the layout of a message, see `check_bridge`."""
    check_bridge(ours, KVLayout.from_proto(peer))


def _faults(of: KVLayout) -> list[str]:
    """Faults of a layout that no KV cache can have."""
    faults = [
        f"{name}: {getattr(of, name)} there is not in 1..{largest}"
        for name, largest in LARGEST.items()
        if not 1 <= getattr(of, name) <= largest
    ]
    if not is_known(of.dtype):
        faults.append(f"dtype: {_shown(of, 'dtype')!r} there is unknown")
    if of.axis_order not in AXIS_ORDERS.values():
        faults.append(f"axis_order: {_shown(of, 'axis_order')!r} there is unknown")
    faults += _faults_of_packings(of)
    if not 0 <= of.num_draft_layers < of.num_layers:
        faults.append(f"num_draft_layers: {of.num_draft_layers} there of {of.num_layers} layers")
    if of.draft_num_vectors not in range(KEY_AND_VALUE + 1):
        faults.append(f"draft_num_vectors: {of.draft_num_vectors} there is not in 0..{KEY_AND_VALUE}")
    if of.draft_tensor_parallel not in (0, 1, of.tensor_parallel):
        faults.append(f"draft_tensor_parallel: {of.draft_tensor_parallel} there of {of.tensor_parallel} ranks")
    faults += [
        f"head_dim: {dim} there cannot be in {_shown(of, 'dtype')}"
        for dim in dict.fromkeys((of.head_dim, *(dim for _, dim in of.layer_shapes)))
        if dim % dim_multiple(of.dtype)
    ]
    return faults + _faults_of_shapes(of)


def _faults_of_packings(of: KVLayout) -> list[str]:
    if of.packing not in PACKINGS:
        return [f"packing: {_shown(of, 'packing')!r} there is unknown"]
    if of.draft_packing not in ("", *PACKINGS):
        return [f"draft_packing: {_shown(of, 'draft_packing')!r} there is unknown"]
    used, vectors = (of.packing, of.draft_packing), f"{of.num_vectors} x {of.head_dim}"
    blocks, faults = f"packing: blocks of {of.block_size} slots of {vectors}", list[str]()
    if DOT in used and not of.can_be_dot:
        faults.append(f"{blocks} there cannot be {DOT!r}")
    if SCALES_LAST in used and not of.can_be_scales_last:
        faults.append(f"{blocks} in {_shown(of, 'dtype')} there cannot be {SCALES_LAST!r}")
    if of.has_tail and (of.block_size, of.packing, of.num_vectors, of.num_draft_layers) != (*WHOLE_BLOCKS, 0):
        faults.append(f"{blocks} there, {of.num_draft_layers} layers of a draft, cannot be in {of.dtype}")
    return faults


def _faults_of_shapes(of: KVLayout) -> list[str]:
    shapes, first = of.layer_shapes, (of.num_kv_heads, of.head_dim)
    faults: list[str] = []
    if shapes and (len(shapes) != of.num_layers or shapes[0] != first):
        faults.append(f"layer_shapes: {len(shapes)} there of {of.num_layers} layers, the first {_by(shapes[0])}")
    for heads, dim in dict.fromkeys(shapes):
        if not (1 <= heads <= LARGEST["num_kv_heads"] and 1 <= dim <= LARGEST["head_dim"]):
            faults.append(f"layer_shapes: {_by((heads, dim))} there is no size of a layer")
    is_whole = of.draft_tensor_parallel == 1  # the draft's layers
    for heads, _ in dict.fromkeys((first, *shapes[: max(of.num_target_layers, 0) if is_whole else None])):
        more, less = max(heads, of.tensor_parallel), min(heads, of.tensor_parallel)
        if less > 0 and more % less:
            faults.append(f"{heads} heads there do not divide over {of.tensor_parallel} ranks")
    return faults


def _shown(of: KVLayout, name: str) -> str:
    """Format a field for an error message."""
    if name != "layer_shapes":
        return str(getattr(of, name))[:MAX_SHOWN_CHARS]
    found = Counter(of.layer_shapes).most_common(MAX_FAULTS)
    return ", ".join(f"{num} of {_by(shape)}" for shape, num in found) or "alike"


def _by(shape: Shape) -> str:
    heads, dim = shape
    return f"{heads} x {dim}"
