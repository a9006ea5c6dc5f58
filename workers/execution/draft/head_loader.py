"""Loads a head that drafts beside its target (methods `eagle3` and `mtp`): checks that it fits, then reads weights.

HeadSource.open    the head's config; its KV becomes the last layers of the layout, packed as whoever computes it wants
HeadSource.taken   what the target's steps must leave for it
HeadSource.load    its weights, and those of the target that it shares
"""

import logging
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from ...config.worker_config import WorkerConfig
from ...device.kv_cache import KVCache
from ...kv.layout import DOT, ROWS
from ...models.checkpoint.weights import DTYPES, Checkpoint
from ...models.families.spec import ModelSpec
from ...models.head_specs.head_bytes import head_weight_bytes
from ...models.head_specs.head_config import read_head_spec
from ...models.head_specs.head_limits import why_torch_head
from ...models.head_specs.head_spec import HeadSpec, HiddenState
from ...models.heads.draft_head import SharedWeights
from ...models.heads.loading import load_head
from ...models.heads.vocabulary_map import DraftVocabulary
from ...models.layers.hidden_states import HiddenStates
from ...models.layers.rope import rope_tables
from ...models.plan.draft_fit import check_kv_fits
from ...models.plan.kv_plan import DraftKVShape
from ...models.plan.shards import read_index, samples, shards
from ...sampling.sampler import Sampler
from ..common.backend import BackendLoader
from .head_draft import HeadDraft

log = logging.getLogger("diptych.worker")


@dataclass(frozen=True, slots=True)
class HeadSource:
    folder: Path
    spec: HeadSpec
    taken: HiddenStates = field(repr=False)
    packing: str  # of its KV: the target's, but where torch computes the head beside compiled kernels

    @classmethod
    def open(
        cls, config: WorkerConfig, target: ModelSpec, max_context_tokens: int, packing: str
    ) -> "HeadSource | None":
        """Read the config of the head that the settings name; None: they name none. packing: of the target's KV. Raises
        ConfigError, CheckpointError or UnsupportedArchitecture, naming both models."""
        if not config.speculation.has_head:
            return None
        served, method = config.model.model, config.speculation.speculation
        folder = Path(config.speculation.draft_model or served)
        spec = read_head_spec(folder, target, method)
        check_kv_fits(folder, spec.decoder, Path(served), target, max_context_tokens)
        is_final = spec.takes is not HiddenState.AFTER_LAYERS
        taken = HiddenStates(spec.hidden_layers, is_final=is_final, is_normed=spec.takes is HiddenState.FINAL_NORMED)
        why = why_torch_head(spec, config.cache.block_size, config.kv_dtype) if packing == DOT else None
        if why is not None:
            log.info("torch computes the head %s: %s", folder, why)
        return cls(folder, spec, taken, packing if why is None else ROWS)

    def kv_shape(self, target_id: str) -> DraftKVShape:
        """target_id: as workers compare it. KV of one head is that of another only where the target is the same."""
        digest = blake2b(target_id.encode() + (self.folder / "config.json").read_bytes(), digest_size=16)
        for path in shards(self.folder, read_index(self.folder)):
            for name, sample in sorted(samples(path).items()):
                digest.update(name.encode() + sample)
        return DraftKVShape(self.spec.kv, digest.hexdigest(), self.packing, num_ranks=1)  # rank 0 computes it, alone

    def weight_bytes(self, target: ModelSpec, dtype: str) -> int:
        """Bytes of its weights, with its copies of the target's. Raises CheckpointError for files that are broken."""
        return head_weight_bytes(self.folder, target, dtype)

    def load(
        self, config: WorkerConfig, target: Checkpoint, loader: BackendLoader, cache: KVCache, max_context_tokens: int
    ) -> HeadDraft:
        dtype, device = DTYPES[config.model.dtype], loader.torch_device
        outer = target.reader(dtype, device).outer()
        embed = outer.tensor("embed")
        shared = SharedWeights(embed, outer.tensor("lm_head") if outer.has("lm_head") else embed)
        first = cache.layout.num_target_layers
        head = load_head(self.folder, target.spec, shared, dtype, device, first)
        cos_sin = rope_tables(self.spec.decoder, max_context_tokens, device)
        vocabulary = DraftVocabulary(self.spec.decoder.vocab_size, head.parts.to_target)
        passes = loader.head_passes(head, cache, cos_sin)
        sampler = Sampler(target.spec.eos_token_ids, passes.rows)
        return HeadDraft(passes, self.taken, vocabulary, cache.layout.block_size, sampler)
