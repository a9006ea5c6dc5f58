"""Steps of a rank on its own device, as rank 0 plans them; a worker of one GPU has no other rank.

    main lane       upload ── decode graph ──────────────────────────────┬── sample ── read back ──> tokens
    prompt lane             └─ prompts, layer by layer, if there are any ─┘

Of several ranks the prompts come after the decodes: what the ranks say to each other is in one order on all of them.
The main lane has all steps in order; the prompt lane begins after what is on it, and is waited for.

Workers that share experts launch layers of as many rows in each step (ranks/agreed_step.py): all a decode graph of one
bucket, or else all kernel by kernel, prompts and decodes on the prompt lane, large steps in halves (halves.py).
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ....kernels.kv.block_copy import copy_blocks
from ...common.errors import InternalError
from ...device.device import Device
from ...device.device_errors import LESS_KV, needing_memory
from ...models.families.spec import ModelSpec
from ...models.layers.decoder import Decoder
from ...ranks.agreed_step import StepSize
from ...ranks.device_peers import DevicePeers
from ...sampling.pooler import Pooler
from ...sampling.prompt_scorer import PromptScorer
from ..common.backend import StepResources
from ..common.halves import Halves, are_wanted, least_rows, rows_of_half
from ..common.latent_choice import choose_latents
from ..common.library_choice import OURS, PromptLibraries
from .buckets import StepSizes
from .decode_graphs import DecodeGraphs
from .device_sampler import DeviceSampler
from .device_tables import DeviceTables
from .forward import ForwardPieces
from .key_bounds_part import KeyBoundsPart
from .prompt_part import TABLE_BLOCKS, PromptPart, PromptRun
from .query_pieces import has_drafts
from .step_buffers import NUM_HOST_BUFFERS, HostBuffers, StepBuffers
from .step_plan import SPARSE, TABLE, Ints, PlanLimits, StepPlan

GRAPH_TOKENS = 512  # of a step with prompts whose pieces are graphs: beyond, a layer takes longer than its launches
# So many times of a mixture: a layer's launches of DeepSeek-V2-Lite took 1.1 ms on an H200, whatever the prompt had;
# 1,024 tokens of a larger step took 0.4 ms.
MIXTURE_TIMES = 4


def graph_tokens_of(spec: ModelSpec) -> int:
    """Return the most tokens of a step with prompts whose pieces are graphs."""
    return GRAPH_TOKENS * (MIXTURE_TIMES if spec.num_experts else 1)


class RankSteps:
    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        resources: StepResources,
        sampler: DeviceSampler | None,
        sizes: StepSizes,
        *,
        graph_tokens: int | None = GRAPH_TOKENS,
        peers: DevicePeers | None = None,
        libraries: PromptLibraries = OURS,
    ) -> None:
        """sampler: rank 0's. graph_tokens: None: no graphs. peers: workers that share experts, which are joined. All
        ranks, or workers, do it together.

        Raises ConfigError where the device has too little memory, RankLost for a worker that ends.
        """
        cache, taken = resources.cache, resources.taken
        layout, cos_sin = cache.layout, torch.cat(resources.cos_sin, dim=1)
        self.group, self.device, self._cache = decoder.group, device, cache
        self.expert_tokens, self.sparse_budget = decoder.expert_tokens, cache.bounds.budget
        self.main, prompt_lane = device.lane("main", high_priority=True), device.lane("prompts")
        self.taken, pieces = taken, ForwardPieces(decoder, cache, taken)
        vocab_size = decoder.spec.vocab_size
        remedy = f"{LESS_KV} or max_running, or set cuda_graphs to false"
        with needing_memory("the buffers and graphs of steps", remedy):
            max_blocks = -(-layout.num_blocks_for(len(cos_sin)) // TABLE_BLOCKS) * TABLE_BLOCKS
            self.buffers = StepBuffers(device, sizes, max_blocks, sampler.logits if sampler is not None else None)
            self.tables = DeviceTables(device, max_blocks, sizes.max_sequences)
            self.prompts = PromptPart(device, prompt_lane, pieces, cos_sin, self.tables.tensor, self.buffers.tokens)
            self.graphs = DecodeGraphs(pieces, cos_sin, self.buffers, sampler)
            self._bounds = KeyBoundsPart(device, cache, decoder.layers)
            try:
                self._make_ready(decoder, sampler, sizes.max_batch_tokens, graph_tokens, peers, libraries)
                with needing_memory("the largest step", f"{LESS_KV} or max_batch_tokens"):
                    self.prompts.take_memory(sizes.max_batch_tokens, resources.later_bytes)
            except BaseException:
                self.close()
                raise
        self.limits = PlanLimits(
            sizes.max_rows,
            (self.tables.tensor.shape[0], max_blocks),
            cache.num_blocks,
            layout.block_size,
            layout.num_layers,
            len(cos_sin),
            vocab_size,
            cache.bounds.num_chosen,
            cache.num_tail_blocks,
        )
        self._decoder, self._exchange = decoder, None if peers is None else peers.exchange
        self._beside = device.lane("exchanges") if peers is not None and are_wanted() else None
        self._least_rows = 0 if self._beside is None else least_rows(decoder.spec)
        self._gathered: tuple[list[int], int] | None = None  # table rows that the decode graphs' tables are, and bucket
        self._num_followed = 0

    def _make_ready(
        self,
        decoder: Decoder,
        sampler: DeviceSampler | None,
        max_tokens: int,
        graph_tokens: int | None,
        peers: DevicePeers | None,
        libraries: PromptLibraries,
    ) -> None:
        """Compile kernels, choose those of decodes, meet the other workers and capture graphs."""
        device = self.device
        device.synchronize()  # memory that was allocated outside these lanes is ready
        if sampler is not None:
            self.main.run(sampler.warm_up)
        self.prompts.warm_up(max_tokens, libraries, 1 if peers is None else peers.exchange.size)
        self.buffers.latents = self.prompts.latents = choose_latents(self.main, decoder, self._cache)
        if peers is not None:  # what was compiled may have taken long
            device.synchronize()
            peers.join()
        if graph_tokens is not None:
            self.graphs.capture(device, self.main)
        if graph_tokens is not None and peers is None:
            self.prompts.capture(graph_tokens)
        device.synchronize()

    def graph_of(self, step: StepSize) -> int | None:
        """Return the bucket of the decode graph that all workers launch; None: none."""
        return None if step.has_prompts else self.graphs.bucket(step.num_rows)

    def halves_of(self, step: StepSize) -> Halves | None:
        """Return the halves in which all workers compute a step without a graph; None: it is computed whole."""
        if self._beside is None or step.num_rows < self._least_rows:
            return None
        assert self._exchange is not None
        return Halves(self._exchange, self._beside, rows_of_half(step.num_rows))

    def run(
        self,
        plan: StepPlan,
        index: int,
        scorer: PromptScorer | None = None,
        pooler: Pooler | None = None,
        step: StepSize | None = None,
    ) -> PromptRun | None:
        """Launch a step with host buffers `index`, whose last step was waited for. `finish` follows, before anything
        else is launched. scorer, pooler: rank 0's. step: of all workers that share experts, with which the plan
        agrees."""
        host, num_decodes, run = self.buffers.host[index], plan.decodes.shape[1], None
        if plan.tables.size:
            self.tables.change(self.main, plan.tables)
            self._gathered = None
        if len(plan.bounds):
            self._bounds.launch(self.main, plan.bounds)
        agreed = None if step is None else self._agree(step)
        halves = None if step is None or agreed is not None else self.halves_of(step)
        is_beside = self.group.size == 1
        before = self.main.record() if plan.prompts is not None and is_beside else None
        bucket = agreed or (self.graphs.bucket(num_decodes) if num_decodes else None)
        if num_decodes and bucket is None:
            raise InternalError(f"{num_decodes} rows need a decode graph, but none was captured")
        if bucket is not None:
            self.main.run(self._decode(host, plan, bucket))
        if plan.prompts is not None:
            self.prompts.lane.after(before or self.main.record())
            is_alone = bucket is None or not is_beside
            run = self.prompts.run(plan.prompts, plan.ends, scorer, pooler, is_alone=is_alone, halves=halves)
            self.main.after(self.prompts.lane.record())
        if plan.is_empty and bucket is None:
            self._serve(halves)
        return run

    def _agree(self, step: StepSize) -> int | None:
        """Have lanes exchange rows as agreed. Returns the bucket of the decode graph."""
        bucket = self.graph_of(step)
        assert self._exchange is not None
        if bucket is None:  # a graph has the number
            self.main.run(partial(self._exchange.agree, step.num_rows))
        return bucket

    def _serve(self, halves: Halves | None) -> None:
        decoder = self._decoder
        if halves is None:
            self.main.run(decoder.serve)
        else:
            halves.run(self.main, [decoder.serve_in_turns(decoder.layers) for _ in range(2)], decoder.layers)

    def finish(self, plan: StepPlan, index: int, run: PromptRun | None) -> None:
        """Launch what chooses the step's tokens, and reads them back. run: what `run` returned."""
        self.main.run(partial(self._finish, plan, index, run))
        self.hold(index)

    def hold(self, index: int) -> None:
        """Let host buffers `index` be written again only once what was launched is computed."""
        self.buffers.host[index].used = self.main.record()

    def follow(self, message: Ints) -> None:
        """Carry out a message from rank 0 (step_plan.py), on another rank. Raises InternalError where it is invalid."""
        plan = self.limits.parse(message)
        if not isinstance(plan, StepPlan):
            self.copy_blocks(plan)
            return
        index = self._num_followed % NUM_HOST_BUFFERS
        self._num_followed += 1
        self.buffers.host[index].wait()
        self.finish(plan, index, self.run(plan, index))

    def copy_blocks(self, pairs: Ints) -> None:
        """pairs: [2, P], from and to, of this rank's blocks; in the order of steps."""
        ids = self.device.pinned(pairs.shape, torch.int64)
        ids.numpy()[:] = pairs
        self.main.run(partial(_copy, self._cache.by_block, ids))

    def close(self) -> None:
        """End all steps. A communicator does not end while graphs hold its calls."""
        self.graphs.close()
        self.prompts.close()

    def forget(self) -> None:
        """Forget what steps have left on the device: they may not have been computed."""
        self._gathered = None

    def _decode(self, host: HostBuffers, plan: StepPlan, bucket: int) -> partial[None]:
        """Write the host buffers; return the device work."""
        decodes = plan.decodes
        max_queries = self.graphs.queries(bucket, has_drafts=has_drafts(decodes))
        is_sparse = bool(decodes[SPARSE].any())
        host.write(decodes, bucket, max_queries, plan.tails, self.limits.block_size)
        gathered = decodes[TABLE].tolist(), bucket
        is_gathered, self._gathered = self._gathered == gathered, gathered
        return partial(self._compute_decodes, host, (bucket, max_queries, is_sparse), is_gathered)

    def _compute_decodes(self, host: HostBuffers, graph: tuple[int, int, bool], is_gathered: bool) -> None:
        """Device work. graph: arguments of DecodeGraphs.forward."""
        self.buffers.upload(host)
        if not is_gathered:
            self.buffers.gather_tables(self.tables.tensor, graph[0])
        self.graphs.forward(*graph)

    def _finish(self, plan: StepPlan, index: int, run: PromptRun | None) -> None:
        """Device work: tokens of all that is sampled. Once it is done every rank has stored the step's KV."""
        buffers, first = self.buffers, plan.decodes.shape[1]
        if self.taken is not None:
            self.taken.put_rows(self._taken_of(first, run))
        if not plan.num_sampled:
            self.group.meet()
            return
        if run is not None and run.logits is not None:
            buffers.logits[first : first + run.num_sampled].copy_(run.logits)
        self.graphs.choose(plan.num_sampled, index, is_plain=plan.is_plain)
        buffers.read_back(buffers.host[index])

    def _taken_of(self, num_decodes: int, run: PromptRun | None) -> Tensor:
        """Return a copy of what was taken of a step's rows, [T, A]: those of decodes, then those of prompts."""
        parts = [] if self.graphs.taken is None else [self.graphs.taken[:num_decodes]]
        parts += [] if run is None or run.taken is None else [run.taken]
        return torch.cat(parts)


def _copy(pools: Sequence[Tensor], ids: Tensor) -> None:
    of, to = ids.to(pools[0].device, non_blocking=True)
    for pool in pools:
        copy_blocks(pool, pool, of, to)
