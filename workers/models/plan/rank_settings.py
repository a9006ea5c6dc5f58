"""Start settings of a worker's rank, and the first bytes that it and rank 0 exchange. No torch."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from ...kv.layout import KVLayout
from .expert_placement import Placement
from .sharding import Share

READY = b"ready\n"  # on standard output, once the weights are read
GO = b"g"  # on standard input, once all are ready: they may read their weights at very different speeds


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
    num_machines: int = 1  # over which the ranks are spread evenly
    link_fd: int = -1  # of a socket to the machine's first rank
    peer_fds: tuple[int, ...] = ()  # of those to the machine's others, at the first rank of a machine without rank 0
    machine_kv_fd: int = -1  # of a connection to rank 0's process, there: for hand-offs of this machine's KV
    kv_link_fd: int = -1  # of another, for hand-offs' reads into this rank's piece; -1: rank 0 reads all
    sums_fd: int | None = None  # memory for sums, by the compiled kernels; None: they go over gloo
    rendezvous: str = ""  # file, or HOST:PORT of a store
    own_host: str = ""  # address of this machine, for ranks on others
    parent_pid: int = 0

    @property
    def share(self) -> Share:
        if self.experts is None:
            return Share(self.rank, self.size)
        experts = {int(layer): Placement.of(held) for layer, held in self.experts.items()}
        return Share(self.rank, self.size, experts)

    @property
    def machine_ranks(self) -> range:
        """The ranks on this rank's machine."""
        num = self.size // self.num_machines
        return range(self.rank // num * num, self.rank // num * num + num)

    @property
    def place_on_machine(self) -> tuple[int, int]:
        """Place of this rank among those of its machine, and their number."""
        ranks = self.machine_ranks
        return self.rank - ranks.start, len(ranks)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RankSettings":
        """text: as `to_json` makes it."""
        found: dict[str, Any] = json.loads(text)
        layout: dict[str, Any] = found.pop("layout")
        shapes = tuple((heads, dim) for heads, dim in layout.pop("layer_shapes"))
        found["peer_fds"] = tuple(found["peer_fds"])
        return cls(layout=KVLayout(**layout, layer_shapes=shapes), **found)


def told_of(share: Share) -> dict[str, list[list[int]]] | None:
    """RankSettings.experts."""
    if share.experts is None:
        return None
    return {str(layer): [list(held) for held in of.held] for layer, of in share.experts.items()}
