"""Interface of a backend: code that loads a model's weights and computes batches on one kind of hardware.

    BackendLoader.load -> LoadedWeights   (the ranks join; KV memory is reserved)
        rank 0    LoadedWeights.build -> Backend   launch a batch, wait for its tokens (InFlightStep) ... close
        others    LoadedWeights.follow -> Follow   compute the step messages of rank 0
        both, of what drafts: step_decoder and follow_draft

Each backend has a folder beside this one. Only factory.py chooses among them: a new backend is a folder and a line
there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....kernels.cpu.sample import RowSampler
from ...common.request import SamplingParams
from ...core.runner import InFlightStep, LayerWatch
from ...core.sequence import Batch
from ...device.device import Device
from ...device.kv_cache import KVCache, SharedPool
from ...kv.layout import KVLayout
from ...models.checkpoint.weights import Checkpoint, Progress
from ...models.heads.draft_head import DraftHead
from ...models.heads.passes import HostPasses
from ...models.layers.hidden_states import HiddenStates
from ...models.layers.rope import Ropes
from ...models.layers.step import Int32s, Step
from ...models.plan.sharding import Share
from ...parallel.groups import Group
from ...parallel.rendezvous import PeerSockets
from ...ranks.rank_processes import OnLoss, RankProcesses
from ...sampling.sampler import Sampler
from .draft_rows import DraftPasses, HeadPasses
from .draft_turns import DraftTurns

Follow = Callable[[Int32s], object]  # computes the step of one message, on ranks other than 0


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """Settings of one rank's backend."""

    dtype: str
    block_size: int
    max_context_tokens: int
    kv_dtype: str  # of kv/dtypes.py
    quantize: str | None = None
    cores: tuple[int, ...] | None = None  # of this rank's threads; None: not bound
    share_cores: bool = False  # lend its cores while there is nothing to compute, and borrow others
    look_ahead: bool = False  # prepare a step while the previous one is computed, where that is an option
    max_running: int = 1  # sequences in a batch, where buffers have a fixed size
    max_draft_tokens: int = 0  # there, of a sequence; 0: nothing is drafted
    max_batch_tokens: int = 512  # there, of a step
    graph_tokens: int | None = None  # see RankSteps
    sparse_budget: int = 0  # tokens that a decode attends to, 0: all; see decoding.py


@dataclass(frozen=True, slots=True)
class StepResources:
    """Resources that one rank's steps use, besides its weights."""

    cache: KVCache
    cos_sin: Ropes  # on the device that computes
    group: Group
    ranks: RankProcesses | None = None  # on rank 0: the other ranks
    peer_sockets: PeerSockets | None = None  # of workers that share experts with this one
    on_loss: OnLoss = lambda _error: None
    first_layer: int = 0  # of the cache, that is the first of these weights'
    taken: HiddenStates | None = None  # gets what a draft head is given, of each step
    later_bytes: int = 0  # that what drafts takes of the device, once the steps are ready
    turns: DraftTurns | None = None  # of what drafts, where workers that share experts compute on devices


class Backend(Protocol):
    """Computes the batches of a worker, on its rank 0. The methods are those of Runner."""

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> InFlightStep: ...

    @property
    def has_borrowed_cores(self) -> bool: ...

    def takes_input_from_previous(self, sampling: SamplingParams) -> bool: ...

    def expert_tokens(self) -> npt.NDArray[np.int64] | None: ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks, in the order of launched steps."""
        ...

    @property
    def turns(self) -> DraftTurns | None:
        """Turns of what drafts, with steps of workers that share experts; None: it needs none."""
        ...

    def check(self) -> None: ...

    def close(self) -> None:
        """End the other ranks, the threads and the device work of this backend. Idempotent."""
        ...


class MadePasses(NamedTuple):
    """Passes of a draft head."""

    host: HostPasses
    device: HeadPasses | None = None  # the same, where they are chained on a device
    rows: RowSampler | None = None  # of their logits; None: torch samples


class StepDecoder(Protocol):
    """Computes steps that nobody launched: those of drafts."""

    @property
    def sampler(self) -> Sampler:
        """Sampler of its logits; it knows no grammars."""
        ...

    @property
    def passes(self) -> DraftPasses | None:
        """Passes of drafts that are chained on a device; None: each is a step."""
        ...

    def compute(self, step: Step) -> Tensor | None:
        """Compute a step whose sequences with one new token come first: its KV into the cache. Returns the logits of
        its sampled rows, [R, vocab] float32, valid until the next step; None where there are none. On ranks other than
        0 what it returns means nothing."""
        ...


class LoadedWeights(Protocol):
    """Weights of a rank, in the form in which its backend computes with them."""

    def step_bytes(self) -> int:
        """Choose what computes on a device, and return the memory there that the largest step then takes beside weights
        and KV, by computing one; 0 on CPU. Once, before `build` or `follow`. Raises ConfigError where there is too
        little."""
        ...

    def build(self, resources: StepResources) -> Backend: ...

    def follow(self, resources: StepResources) -> Follow: ...

    def step_decoder(self, resources: StepResources, skipped: Sequence[int] = ()) -> StepDecoder:
        """Return rank 0's decoder of drafts, without the layers `skipped` (ascending). The ranks of its resources
        compute each step with it, and make theirs ready (`follow_draft`) at the same time. Raises ConfigError where the
        backend has none."""
        ...

    def follow_draft(self, compute: Follow, resources: StepResources, skipped: Sequence[int] = ()) -> Follow:
        """Return what computes the step messages of two models, on another rank. compute: those of the model that is
        served; resources, skipped: of what drafts, as `step_decoder` has them."""
        ...


class BackendLoader(Protocol):
    """Loads one rank's weights and KV memory."""

    @property
    def packing(self) -> str:
        """Packing of KV that the backend computes with, of kv/layout.py."""
        ...

    @property
    def quantize(self) -> str | None:
        """Quantised format in which weights stay in memory; None: the backend stores them at full size."""
        ...

    @property
    def keeps_numbers(self) -> bool:
        """True: the numbers of a quantised checkpoint stay in memory as they are stored, where they can be computed
        with; False: all are decoded."""
        ...

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def gpu(self) -> Device | None:
        """Device whose memory and groups the ranks use; None: those of the host."""
        ...

    def load(self, checkpoint: Checkpoint, share: Share, progress: Progress) -> LoadedWeights: ...

    def head_passes(self, head: DraftHead, cache: KVCache, cos_sin: Ropes) -> MadePasses:
        """Make what computes a head's drafts. cos_sin: of the head's ropes. The target is loaded. Raises ConfigError
        where memory is too little."""
        ...

    def make_cache(
        self, layout: KVLayout, num_blocks: int, rank: int, shared: SharedPool | None, ranks: range | None = None
    ) -> KVCache:
        """Reserve KV memory. shared: see KVCache."""
        ...


def no_progress(_done: int, _total: int) -> None:
    """Report nothing."""
