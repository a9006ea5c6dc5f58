"""Loads a head that drafts beside its target (methods `eagle3` and `mtp`): checks that it fits, then reads weights.

HeadSource.open    the head's config; its KV becomes the last layers of the layout, as rows, whatever the target's
HeadSource.taken   what the target's steps must leave for it
HeadSource.load    its weights, and those of the target that it shares
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from ...config.worker_config import WorkerConfig
from ...device.kv_cache import KVCache
from ...kv.layout import ROWS
from ...models.checkpoint.weights import DTYPES, Checkpoint
from ...models.families.spec import ModelSpec
from ...models.head_specs.head_bytes import head_weight_bytes
from ...models.head_specs.head_config import read_head_spec
from ...models.head_specs.head_spec import HeadSpec, HiddenState
from ...models.heads.draft_head import SharedWeights
from ...models.heads.loading import load_head
from ...models.layers.hidden_states import HiddenStates
from ...models.layers.rope import rope_tables
from ...models.plan.draft_fit import check_kv_fits
from ...models.plan.kv_plan import DraftKVShape
from ...models.plan.shards import read_index, samples, shards
from ...sampling.sampler import Sampler
from ..common.backend import BackendLoader
from .head_draft import HeadDraft


@dataclass(frozen=True, slots=True)
class HeadSource:
    folder: Path
    spec: HeadSpec
    taken: HiddenStates = field(repr=False)

    @classmethod
    def open(cls, config: WorkerConfig, target: ModelSpec, max_context_tokens: int) -> "HeadSource | None":
        """Read the config of the head that the settings name; None: they name none. Raises ConfigError, CheckpointError
        or UnsupportedArchitecture, naming both models."""
        if not config.speculation.has_head:
            return None
        served, method = config.model.model, config.speculation.speculation
        folder = Path(config.speculation.draft_model or served)
        spec = read_head_spec(folder, target, method)
        check_kv_fits(folder, spec.decoder, Path(served), target, max_context_tokens)
        is_final = spec.takes is not HiddenState.AFTER_LAYERS
        taken = HiddenStates(spec.hidden_layers, is_final=is_final, is_normed=spec.takes is HiddenState.FINAL_NORMED)
        return cls(folder, spec, taken)

    def kv_shape(self, target_id: str) -> DraftKVShape:
        """target_id: as workers compare it. KV of one head is that of another only where the target is the same."""
        digest = blake2b(target_id.encode() + (self.folder / "config.json").read_bytes(), digest_size=16)
        for path in shards(self.folder, read_index(self.folder)):
            for name, sample in sorted(samples(path).items()):
                digest.update(name.encode() + sample)
        return DraftKVShape(self.spec.kv, digest.hexdigest(), ROWS, num_ranks=1)  # rank 0 computes a head, alone

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
        return HeadDraft(head, self.taken, cache, cos_sin, Sampler(target.spec.eos_token_ids))
