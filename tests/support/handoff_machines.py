"""State machines of a hand-off, and segments for them."""

from diptych.workers.handoff.sink_machine import SinkHandoff
from diptych.workers.handoff.source_machine import SourceHandoff
from diptych.workers.handoff.types import Seal
from diptych.workers.kv.segment import Segment

NUM_LAYERS = 3
FIRST = Segment(0, (5, 6), (1, 1), 0, NUM_LAYERS)
LAST = Segment(2, (9,), (4,), 0, NUM_LAYERS)
SEAL = Seal(2, 11, (7,))


def source() -> SourceHandoff:
    """Source machine with 3 blocks, leased for 10 s at time 0."""
    return SourceHandoff(num_blocks=3, num_layers=NUM_LAYERS, lease_s=10.0, now=0.0)


def sink() -> SinkHandoff:
    return SinkHandoff(deadline=100.0, open_by=8.0)
