"""Start settings of a worker's rank, and the first bytes that it and rank 0 exchange. No torch."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from ...kv.layout import KVLayout
from .expert_placement import Placement
from .sharding import Share

READY = b"ready\n"  # on the life line, once the weights are read
GO = b"g"  # from rank 0, once all are ready: they may read their weights at very different speeds


@dataclass(frozen=True, slots=True)
class RankSettings:
    model_path: str
    layout: KVLayout  # of the pool
    dtype: str  # in which the model computes
    max_context_tokens: int
    num_threads: int
    size: int
    cpu_isa: str = "none"  # of the compiled kernels that compute; "none": torch does
    cores: tuple[int, ...] | None = None  # of all ranks
    quantize: str | None = None
    experts: dict[str, list[list[int]]] | None = None  # Share.experts: by layer, the experts of each rank
    draft_model: str | None = None  # folder of a model that all ranks draft with
    skipped_layers: tuple[int, ...] = ()  # with which the model itself drafts
    device: str = "cpu"  # rank 0's
    max_running: int = 1  # sequences in a batch, on GPUs
    max_draft_tokens: int = 0  # of a sequence, there; 0: nothing is drafted
    max_batch_tokens: int = 512  # of a step, there
    graph_tokens: int | None = None  # there, see RankSteps
    sparse_budget: int = 0  # tokens that a sparse decode attends to; 0: none is
    rank: int = 0
    memory_fd: int = -1
    link_fd: int = -1  # of a socket to rank 0
    kv_link_fd: int = -1  # of another, for hand-offs' reads into this rank's piece; -1: rank 0 reads all
    sums_fd: int | None = None  # memory for sums, by the compiled kernels; None: they go over gloo
    rendezvous: str = ""
    parent_pid: int = 0

    @property
    def share(self) -> Share:
        if self.experts is None:
            return Share(self.rank, self.size)
        experts = {int(layer): Placement.of(held) for layer, held in self.experts.items()}
        return Share(self.rank, self.size, experts)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RankSettings":
        """text: as `to_json` makes it."""
        found: dict[str, Any] = json.loads(text)
        layout: dict[str, Any] = found.pop("layout")
        shapes = tuple((heads, dim) for heads, dim in layout.pop("layer_shapes"))
        return cls(layout=KVLayout(**layout, layer_shapes=shapes), **found)


def told_of(share: Share) -> dict[str, list[list[int]]] | None:
    """RankSettings.experts."""
    if share.experts is None:
        return None
    return {str(layer): [list(held) for held in of.held] for layer, of in share.experts.items()}
