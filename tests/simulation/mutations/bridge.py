"""Bugs to plant in what takes KV from one layout into another; as mutations.py's."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from diptych.workers.handoff.segment_receiver import SegmentReceiver
from diptych.workers.kv import bridge as kv_bridge
from diptych.workers.kv import layout as kv_layout
from diptych.workers.kv.bridge import Bridge
from diptych.workers.kv.layout import BLOCK_MAJOR, KVLayout, LayerGroup

from .mutations import Replacement


def a_block_begins_where_ours_does() -> list[Replacement]:
    """Wrong as soon as the block sizes differ."""
    real = kv_bridge._spans

    def spans(*args: Any) -> Iterator[Any]:
        for span in real(*args):
            yield replace(span, wire_slot=min(span.slot, args[1] - span.num_tokens))

    return [(kv_bridge, "_spans", spans)]


def a_part_begins_at_the_first_token_that_is_missing() -> list[Replacement]:
    """Wrong as soon as we hold the beginning already, up to within a block of the source."""
    real = kv_bridge._spans

    def spans(part: Any, wire_size: int, own_size: int, table: Any, first_token: int) -> Iterator[Any]:
        start = part.first_block * wire_size
        for span in real(part, wire_size, own_size, table, first_token):
            skipped = max(first_token - start, 0) % wire_size
            yield replace(span, wire_slot=max(span.wire_slot - skipped, 0))

    return [(kv_bridge, "_spans", spans)]


def the_last_tokens_of_a_part_are_left_out() -> list[Replacement]:
    """Leave out the last tokens, where a block of ours begins in the middle of the source's last one."""
    real = kv_bridge._spans

    def spans(part: Any, wire_size: int, own_size: int, *args: Any) -> Iterator[Any]:
        found = list(real(part, wire_size, own_size, *args))
        yield from found[: -1 if len(found) > 1 and own_size < wire_size else None]

    return [(kv_bridge, "_spans", spans)]


def heads_come_from_the_rank_of_the_same_number() -> list[Replacement]:
    real = kv_bridge._head_copies

    def head_copies(source: KVLayout, ours: KVLayout) -> Iterator[Any]:
        for copy in real(source, ours):
            yield replace(copy, wire_rank=min(copy.rank, len(source.distinct_ranks) - 1))

    return [(kv_bridge, "_head_copies", head_copies)]


def heads_come_from_the_beginning_of_a_rank() -> list[Replacement]:
    real = kv_bridge._head_copies

    def head_copies(source: KVLayout, ours: KVLayout) -> Iterator[Any]:
        for copy in real(source, ours):
            yield replace(copy, wire_heads=slice(0, copy.wire_heads.stop - copy.wire_heads.start))

    return [(kv_bridge, "_head_copies", head_copies)]


def replicas_of_a_head_count_as_heads() -> list[Replacement]:
    return [(KVLayout, "distinct_ranks", property(lambda self: range(min(self.tensor_parallel, self.num_kv_heads))))]


def a_layer_major_part_is_taken_for_a_block_major_one() -> list[Replacement]:
    real = Bridge._of_part

    def of_part(self: Bridge, data: memoryview, of: Any, *args: Any) -> Any:
        uniform = replace(of.source.uniform, axis_order=BLOCK_MAJOR)
        return real(self, data, replace(of, source=replace(of.source, uniform=uniform)), *args)

    return [(Bridge, "_of_part", of_part)]


def layers_lie_as_if_all_were_alike() -> list[Replacement]:
    real = kv_layout._layer_groups

    def groups(layout: KVLayout) -> tuple[LayerGroup, ...]:
        return tuple(replace(of, start=of.layers.start * of.uniform.layer_bytes) for of in real(layout))

    return [(kv_layout, "_layer_groups", groups)]


def a_slice_goes_back_before_it_is_converted() -> list[Replacement]:
    real = SegmentReceiver._start_conversion

    def start(self: SegmentReceiver, part: Any, slice_: Any) -> Any:
        self._staging.give_back(slice_)
        return real(self, part, replace(slice_, num_bytes=0))

    return [(SegmentReceiver, "_start_conversion", start)]


def a_failed_read_gives_its_slice_back_at_once() -> list[Replacement]:
    class Loose(list[Any]):
        def __init__(self, staging: Any) -> None:
            self._staging = staging

        def append(self, piece: Any) -> None:
            self._staging.give_back(piece)

    return _with(SegmentReceiver, lambda receiver: setattr(receiver, "_loose", Loose(receiver._staging)))


def a_failed_pull_does_not_wait_for_its_conversions() -> list[Replacement]:
    class Forgetful(set[Any]):
        def add(self, conversion: Any) -> None:
            pass

    return _with(SegmentReceiver, lambda receiver: setattr(receiver, "_converting", Forgetful()))


def _with(cls: type[Any], change: Callable[[Any], object]) -> list[Replacement]:
    """Each new object changed."""
    real = cls.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        change(self)

    return [(cls, "__init__", init)]


BRIDGE_MUTATIONS: tuple[Callable[[], list[Replacement]], ...] = (
    a_block_begins_where_ours_does,
    a_part_begins_at_the_first_token_that_is_missing,
    the_last_tokens_of_a_part_are_left_out,
    heads_come_from_the_rank_of_the_same_number,
    heads_come_from_the_beginning_of_a_rank,
    replicas_of_a_head_count_as_heads,
    a_layer_major_part_is_taken_for_a_block_major_one,
    layers_lie_as_if_all_were_alike,
    a_slice_goes_back_before_it_is_converted,
    a_failed_read_gives_its_slice_back_at_once,
    a_failed_pull_does_not_wait_for_its_conversions,
)
