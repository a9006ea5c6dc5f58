"""Owner of the KV tensors of one worker. Knows bytes and blocks; which block holds what is BlockManager's.

    block-major   [num_blocks, num_layers, V, block_size, heads of this rank, head_dim]   a block is one run on the wire
    layer-major   [num_layers, num_blocks, V, block_size, heads of this rank, head_dim]   as other engines have it

Where blocks are rounded as a whole (kv/dtypes.py), the last axes are [heads of this rank, bytes of a head's block],
and the last tokens of sequences are in `tail`. In the "dot" packing the last axes are [heads of this rank, block_size /
16, 16 * head_dim] (kv/packing.py). Where the dtype is a scaled one (kv/dtypes.py) head_dim has two more: the bytes of a
vector's scale. In the "scales_last" packing, of GPUs, all axes after the first two are one: a layer's bytes in a block.
Kernels are given its `parts`.
V is 2, K and V, or 1: of a latent; of a draft's layers as they have it. Layers that are unlike each have their own
heads and head_dim, where the axes put them. On CPU the pool is a mapping that asks for huge pages: reading it over NIXL
is several times faster, and pages far from those that are used cost no memory (kv/populate.py). Several ranks share one
mapping, each its own part of it, so that rank 0's transports reach them all. On GPUs each rank has its part alone, and
rank 0 maps them all (joined_memory.py).
"""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.cpu.blocks import copy_blocks, copy_blocks_twin
from ...kernels.cpu.library import Library, Team
from ...kernels.kv.kv_scales import KVParts, parts_of, parts_of_pieces
from ..common.memory import huge_page_mapping, shared_mapping
from ..kv.device_kv import CudaDriver
from ..kv.dtypes import stored_size, vector_bytes
from ..kv.layout import BLOCK_MAJOR, DOT, GROUP, SCALES_LAST, KVLayout, LayerGroup, Region
from ..kv.memory import KVMemory
from ..kv.pool_file import PoolFile
from ..kv.pool_pieces import PoolPieces
from ..kv.populate import PoolPopulator
from .device import Device
from .device_errors import LESS_KV, needing_memory
from .joined_memory import Joining
from .key_bounds import NO_BOUNDS, KeyBounds
from .kv_convert import STORED
from .kv_pool import DevicePool
from .virtual_memory import driver_of

SharedPool = PoolFile | int | Joining  # where several processes see one pool


class KVCache:
    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        *,
        rank: int = 0,
        shared: SharedPool | None = None,
        library: Library | None = None,
        gpu: Device | None = None,
        ranks: range | None = None,
    ) -> None:
        """`ranks`: those of the layout that share this pool, on one machine, of which the first one sees it all; None:
        all of them. `shared`: of several ranks, and of one whose pool other workers may map. On CPU a memory file (at
        other ranks its descriptor; it is grown to the size of the pool where it is smaller), for a fake device too. On
        GPUs the ranks' Joining: then all make their caches at one time, of a multiple of `blocks_at_once` (kv_plan.py)
        blocks, and the first rank waits for the others. `library`: compiled kernels that copy blocks, of a pool on CPU;
        torch does without them. `gpu`: the device of which `device` is torch's name, where it is one: then the first
        rank hands the pool off as device memory. Raises ConfigError if the memory is not to be had, RankLost where a
        rank does not join."""
        assert num_blocks > 0
        assert isinstance(shared, PoolFile) or (shared is not None) == (layout.tensor_parallel > 1)
        self.layout = layout
        self.ranks = range(layout.tensor_parallel) if ranks is None else ranks
        self.num_blocks = num_blocks
        self._pieces: PoolPieces | None = None
        self._file = shared if isinstance(shared, PoolFile) else None
        self._mapping: mmap.mmap | None = None
        place = rank - self.ranks.start
        self._pool = self._made(device, place, shared)
        groups = layout.layer_groups(0, layout.num_layers)
        self._layer_groups = [view_of(self._pool, num_blocks, layout, group) for group in groups]
        # Of this rank: all of it, flat where layers are unlike or of two models.
        own = place if len(self._pool) > 1 else 0
        self.tensor = self._pool[own] if len(groups) > 1 else self._layer_groups[0][own]
        axis = 1 if layout.is_block_major else 0
        self._own = [of[own] for of in self._layer_groups]
        self._layers = [of.select(axis, i) for of in self._own for i in range(of.shape[axis])]
        has_parts = not layout.has_tail
        of_layers = ((i, group) for group in groups if has_parts and group.uniform.packing != DOT for i in group.layers)
        self._parts = {i: parts_in(self._layers[i], group) for i, group in of_layers}
        with needing_memory("the buffers of hand-offs", LESS_KV):
            self._on_gpu = (
                self._device_pool(gpu, self._pool, driver_of(gpu)) if gpu is not None and place == 0 else None
            )
        self.bounds = NO_BOUNDS
        self.tail: list[Tensor] = []  # see keep_tail
        self._populator: PoolPopulator | None = None
        if self._mapping is not None and layout.is_block_major and layout.tensor_parallel == 1:
            self._populator = PoolPopulator(self._mapping, num_blocks, layout.block_bytes, layout.block_size)
        # A separate team: blocks may be copied while another team computes.
        self._team = Team(library, 1) if library is not None else None

    @property
    def memory(self) -> KVMemory:
        """KV memory that transports read and write: the pool of the machine's ranks, as the first of them sees it.
        Valid while this object lives."""
        num_bytes = self.num_blocks * self.layout.rank_block_bytes * len(self.ranks)
        region = Region(
            address=self.tensor.data_ptr(),
            num_bytes=num_bytes,
            view=memoryview(self._mapping)[:num_bytes] if self._mapping is not None and self._on_gpu is None else None,
            device_id=self.tensor.device.index or 0,
            is_fake=self._on_gpu is not None and self.tensor.device.type == "cpu",
            pieces=self._pieces,
            file=self._file if self._on_gpu is None else None,
        )
        on_first_use = self._populator.used if self._populator is not None else None
        ranks = self.ranks if len(self.ranks) < self.layout.tensor_parallel else None
        return KVMemory(self.layout, self.num_blocks, region, self._on_gpu, on_first_use, ranks=ranks)

    def memory_of_all(self, gpu: Device, pool: Tensor | None) -> KVMemory:
        """KV memory of all ranks, as another rank's process writes it, by `gpu`; its region is that rank's piece. pool:
        [ranks, bytes] uint8, None where this process made it whole. Raises ConfigError."""
        with needing_memory("the buffers of hand-offs", LESS_KV):
            whole = self._pool if pool is None else pool.view(self._pool.dtype)
            return KVMemory(self.layout, self.num_blocks, self.piece, self._device_pool(gpu, whole, None))

    @property
    def is_on_gpu(self) -> bool:
        """Return whether hand-offs use it as device memory."""
        return self._on_gpu is not None

    @property
    def piece(self) -> Region:
        """Part of the pool that is this rank's, on its own device."""
        device = self.tensor.device
        num_bytes = self.num_blocks * self.layout.rank_block_bytes
        return Region(self.tensor.data_ptr(), num_bytes, None, device.index or 0, is_fake=device.type == "cpu")

    def keep_bounds(self, layers: Mapping[int, int], budget: int) -> None:
        """Keep bounds of the keys of some of the target's layers, see sparse_plan.py; they attend to `budget` tokens.
        Raises ConfigError."""
        assert all(kv < self.layout.num_target_layers for kv in layers.values())
        if layers:
            self.bounds = KeyBounds.of({i: self.layer(kv) for i, kv in layers.items()}, self.layout, budget)

    def keep_tail(self, dtype: str, packing: str, num_blocks: int | None = None) -> None:
        """Keep a KV tail, where blocks are rounded once they are full (kv/dtypes.py), of this rank, of the `dtype` in
        which the model computes and in a packing of full width. `tail` has its layers, as `layer` gives those of such a
        cache. num_blocks: None: as many as the cache has; on CPU those that are never written cost no memory. Raises
        ConfigError."""
        if not self.layout.has_tail or self.tail:
            return
        layout = replace(self.layout, dtype=dtype, packing=packing, axis_order=BLOCK_MAJOR)
        num_blocks = num_blocks or self.num_blocks
        num_bytes = num_blocks * layout.rank_block_bytes
        if self.tensor.device.type == "cpu":
            mapping = huge_page_mapping(num_bytes, LESS_KV, is_sparse=True)
            pool = torch.frombuffer(mapping, dtype=torch.uint8, count=num_bytes)
        else:
            with needing_memory(f"{num_blocks} blocks of the KV tail", LESS_KV):
                pool = torch.zeros(num_bytes, dtype=torch.uint8, device=self.tensor.device)
        pool = pool.view(STORED[dtype]).view(1, -1)
        groups = [view_of(pool, num_blocks, layout, of)[0] for of in layout.layer_groups(0, layout.num_layers)]
        self.tail = [layers for of in groups for layers in of.unbind(1)]

    @property
    def num_tail_blocks(self) -> int:
        return len(self.tail[0]) if self.tail else 0

    def seal(self) -> None:
        """Keep processes that have not mapped the pool from writing it. Call when every rank has."""
        if self._file is not None:
            self._file.seal()

    @property
    def by_block(self) -> list[Tensor]:
        """All of this rank, in tensors as block_copy.py takes them: [num_blocks, layers, ...], contiguous after
        these axes."""
        if self.layout.is_block_major:
            return [self.tensor.view(self.num_blocks, 1, -1)]
        return [of.transpose(0, 1) for of in self._own]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Every layer's KV, of every rank: (from, to). Only a source may stand in two pairs."""
        if not pairs:
            return
        sources, targets = zip(*pairs, strict=True)
        if self.layout.is_block_major:
            pools = [self._pool.view(len(self._pool), self.num_blocks, -1)]
        else:
            pools = [rank for of in self._layer_groups for rank in of]
        for pool in pools:
            if self._team is not None:
                copy_blocks(self._team, pool, sources, targets)
            else:
                copy_blocks_twin(pool, sources, targets)

    def _device_pool(self, gpu: Device, pool: Tensor, driver: CudaDriver | None) -> DevicePool:
        """pool: [ranks, numbers]."""
        groups = self.layout.layer_groups(0, self.layout.num_layers)
        parts = [parts_in(view_of(pool, self.num_blocks, self.layout, group), group) for group in groups]
        return DevicePool(gpu, self.layout, pool.view(-1), parts, driver)

    def _made(self, device: torch.device, place: int, shared: SharedPool | None) -> Tensor:
        """[ranks that are seen here, numbers of one's pool]: all of the machine, or this one alone. place: of this rank
        among them."""
        layout, num_blocks, dtype = self.layout, self.num_blocks, STORED[self.layout.dtype]
        if isinstance(shared, Joining):
            pool, self._pieces = shared.pool(place, num_blocks * layout.rank_block_bytes)
            return pool.view(dtype)
        if device.type == "cpu":
            num_bytes = num_blocks * layout.rank_block_bytes * len(self.ranks)
            self._mapping = _mapping(shared, num_bytes)
            pool = torch.frombuffer(self._mapping, dtype=torch.uint8, count=num_bytes)
            return pool.view(dtype).view(len(self.ranks), -1)
        with needing_memory(f"{num_blocks} KV blocks", LESS_KV):
            num_numbers = num_blocks * layout.rank_block_bytes // dtype.itemsize
            return torch.zeros(1, num_numbers, dtype=dtype, device=device)

    def layer(self, index: int) -> Tensor:
        """View of one layer: [num_blocks, V, block_size, heads of this rank, head_dim], or as its packing has it; of a
        scaled dtype, the bytes of scales too."""
        return self._layers[index]

    def parts(self, index: int) -> KVParts:
        """Views of one layer as torch's and Triton's kernels take it, so not of the "dot" packing: its numbers,
        [num_blocks, V, block_size, heads of this rank, head_dim], and of a scaled dtype their scales. Where there is a
        tail, its numbers."""
        return KVParts(self.tail[index], None) if self.tail else self._parts[index]


def _mapping(shared: PoolFile | int | None, num_bytes: int) -> mmap.mmap:
    if shared is None:
        return huge_page_mapping(num_bytes)
    return shared.map(num_bytes) if isinstance(shared, PoolFile) else shared_mapping(shared, num_bytes)


def view_of(pool: Tensor, num_blocks: int, layout: KVLayout, group: LayerGroup) -> Tensor:
    """pool: [ranks, numbers]. Returns [ranks, blocks, layers, V, block_size, heads of a rank, head_dim], or with layers
    before blocks, as the axes stand, or as the packing has it; a view."""
    uniform, num_layers = group.uniform, len(group.layers)
    size = vector_bytes(layout.dtype, uniform.head_dim) // pool.element_size()
    inner = (uniform.num_vectors, layout.block_size, uniform.heads_per_rank, size)
    if layout.has_tail:
        inner = (uniform.num_vectors, uniform.heads_per_rank, layout.block_size * size)
    elif uniform.packing == DOT:
        assert layout.can_be_dot
        inner = (uniform.num_vectors, uniform.heads_per_rank, layout.block_size // GROUP, GROUP * size)
    elif uniform.packing == SCALES_LAST:
        assert layout.can_be_scales_last
        inner = (uniform.layer_bytes,)
    first, end = (num_bytes // pool.element_size() for num_bytes in (group.start, group.start + group.num_bytes))
    if layout.is_block_major:
        blocks = pool.view(len(pool), num_blocks, -1)[:, :, first:end]
        return blocks.unflatten(2, (num_layers, *inner))
    layers = pool[:, first * num_blocks : end * num_blocks]
    return layers.unflatten(1, (num_layers, num_blocks, *inner))


def parts_in(view: Tensor, group: LayerGroup) -> KVParts:
    """view: of layers of the group, as `view_of` makes it, with any axes before those of a layer. Its numbers, [..., V,
    block_size, heads of a rank, head_dim], and their scales where the dtype is a scaled one. Of blocks that are rounded
    as a whole, their bytes, [..., V, heads of a rank, bytes of a head's block]."""
    of = group.uniform
    if of.has_tail:
        return KVParts(view, None)
    if of.packing == SCALES_LAST:
        size = stored_size(of.dtype, of.head_dim)
        return parts_of_pieces(view, (of.num_vectors, of.block_size, of.heads_per_rank, size))
    return parts_of(view)


def available_bytes(device: torch.device) -> int:
    """Memory that could be had now on `device`."""
    if device.type == "cpu":
        import psutil  # on a GPU nothing else needs it

        return psutil.virtual_memory().available
    free, _ = torch.cuda.mem_get_info(device)
    return free
