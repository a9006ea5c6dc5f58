"""EAGLE-3 draft head (Li et al. 2025, arXiv 2503.01840): reads its tensors, computes its layers.

    enter     fc(aux), the aux normed before it where the config says so
    forward   x = [input_layernorm(embedding), hidden_norm(hidden)]
              residual = hidden, or hidden_norm(hidden) with norm_before_residual
              residual += attention(x);  residual += mlp(post_attention_layernorm(residual));  further layers are plain
    logits    lm_head(norm(residual))

What is fed back for the next draft step is the residual, in the place of fc(aux); with norm_output, norm(residual), as
SGLang and vLLM read that field.
Sources: SpecForge's LlamaForCausalLMEagle3 (specforge/modeling/draft/llama3_eagle.py), speculators' Eagle3DraftModel
(speculators/models/eagle3/core.py, model_definitions.py), vLLM's Eagle3LlamaForCausalLM
(vllm/model_executor/models/llama_eagle3.py).
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from ....kernels.elementwise.rms_norm import rms_norm
from ...common.errors import ConfigError
from ...device.kv_cache import KVCache
from ...parallel.groups import Alone
from ..checkpoint.weights import LayerWeights
from ..head_specs.eagle3_config import Eagle3Config
from ..head_specs.eagle3_tensors import MAPS, eagle3_fields, eagle3_name
from ..head_specs.head_fields import OPTIONAL
from ..head_specs.head_spec import HeadSpec
from ..layers.attention import StepMeta, output
from ..layers.layer import LayerRows, attend, enter, feed_forward, queries, run_layers
from ..layers.turns import finished
from .draft_head import HeadParts, SharedWeights, norm_aux
from .head_files import HeadFiles
from .layer_run import head_layers
from .vocabulary_map import read_vocabulary_map


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """H: hidden size; A: numbers of the hidden states of one token; V: target's vocabulary; D: draft vocabulary."""

    fc: Tensor  # [H, A]
    embed: Tensor  # [V, H]
    embed_norm: Tensor  # [H], of the embeddings
    hidden_norm: Tensor  # [H]
    layers: list[LayerWeights]  # of the first, qkv is [(N + 2K) D, 2 H] and there is no input_norm
    norm: Tensor  # [H]
    lm_head: Tensor  # [D, H]
    aux_norms: tuple[Tensor, ...]  # one of [A], or one of each hidden state
    to_target: Tensor | None  # [D] int64; None: the vocabularies are the same


class Eagle3Head:
    """A DraftHead."""

    def __init__(self, config: Eagle3Config, weights: Eagle3Weights, first_kv_layer: int = 0) -> None:
        """first_kv_layer: which layer of the cache is its first one's."""
        self.config, self.weights, self._first_kv_layer = config, weights, first_kv_layer
        self._eps, self._group = config.head.decoder.rms_norm_eps, Alone()
        self._first, *self._others = head_layers(config.head.decoder, weights.layers, first_kv_layer)

    @property
    def spec(self) -> HeadSpec:
        return self.config.head

    @property
    def parts(self) -> HeadParts:
        own, config = self.weights, self.config
        return HeadParts(
            own.layers,
            self._first_kv_layer,
            own.embed,
            own.embed_norm,
            own.hidden_norm,
            own.norm,
            own.lm_head,
            fc=own.fc,
            to_target=own.to_target,
            aux_norms=own.aux_norms,
            norms_residual=config.norm_before_residual,
            norms_output=config.norm_output,
        )

    def enter(self, aux: Tensor) -> Tensor:
        """See DraftHead."""
        return linear(norm_aux(aux, self.weights.aux_norms, self._eps), self.weights.fc)

    def forward(self, token_ids: Tensor, hidden: Tensor, cache: KVCache, meta: StepMeta) -> Tensor:
        """See DraftHead."""
        layer, own, eps, group = self._first, self.weights, self._eps, self._group
        normed = rms_norm(hidden, own.hidden_norm, eps)
        residual = normed if self.config.norm_before_residual else hidden.clone()
        embedded = rms_norm(embedding(token_ids, own.embed), own.embed_norm, eps)
        kv = cache.parts(layer.kv_id)
        q = queries(layer, torch.cat((embedded, normed), dim=1), kv, meta.cos_sin, meta.slots, group)
        attended = output(layer.weights, attend(layer, q, kv, meta.paged), group)
        entering = enter(attended, residual, layer.weights.mlp_norm, eps)
        residual.add_(finished(feed_forward(layer, entering, residual, meta.slots, group)))
        left = run_layers(self._others, LayerRows(residual, meta), cache, group).hidden
        if left is not None:
            residual.add_(left)
        return self._normed(residual) if self.config.norm_output else residual

    def logits(self, hidden: Tensor) -> Tensor:
        """See DraftHead."""
        normed = hidden if self.config.norm_output else self._normed(hidden)
        return linear(normed, self.weights.lm_head).float()

    def to_target(self, ids: Tensor) -> Tensor:
        """See DraftHead."""
        return ids if self.weights.to_target is None else self.weights.to_target[ids]

    def _normed(self, residual: Tensor) -> Tensor:
        return rms_norm(residual, self.weights.norm, self._eps)


def load_eagle3(
    folder: Path,
    config: Eagle3Config,
    shared: SharedWeights,
    dtype: torch.dtype,
    device: torch.device,
    first_kv_layer: int = 0,
) -> Eagle3Head:
    """Raises CheckpointError and ConfigError, see eagle3_config.py for what is checked before."""
    head = config.head
    layers, outer = eagle3_fields(config)
    with HeadFiles(folder, head.decoder, eagle3_name, MAPS) as files:
        files.check_fields(layers, outer, OPTIONAL)
        to_target = read_vocabulary_map(files, head)
        found = {field: files.tensor(pieces, dtype, device) for field, pieces in outer.items()}
        weights = Eagle3Weights(
            fc=found["fc"],
            embed=found["embed"] if "embed" in found else _shared_embed(files, head, shared),
            embed_norm=found["embed_norm"],
            hidden_norm=found["hidden_norm"],
            layers=[files.layer(fields, dtype, device) for fields in layers],
            norm=found["norm"],
            lm_head=found["lm_head"] if "lm_head" in found else _shared_lm_head(files, head, shared),
            aux_norms=tuple(found[field] for field in sorted(found) if field.startswith("aux_norm")),
            to_target=None if to_target is None else to_target.to(device),
        )
    return Eagle3Head(config, weights, first_kv_layer)


def _shared_embed(files: HeadFiles, head: HeadSpec, shared: SharedWeights) -> Tensor:
    if head.decoder.hidden_size != head.target_hidden_size:
        raise ConfigError(
            f"{files.folder}: the head has no embed_tokens.weight, and its hidden size of {head.decoder.hidden_size} "
            f"differs from the target's {head.target_hidden_size}: give a head that has its own embeddings"
        )
    return shared.embed


def _shared_lm_head(files: HeadFiles, head: HeadSpec, shared: SharedWeights) -> Tensor:
    """Return the target's, as vLLM does, where the head's rows are the same."""
    own, theirs = (head.draft_vocab_size, head.decoder.hidden_size), (head.decoder.vocab_size, head.target_hidden_size)
    if own != theirs:
        raise ConfigError(
            f"{files.folder}: the head has no lm_head.weight of shape {list(own)}, and the target's has "
            f"{list(theirs)}: fetch the head again"
        )
    return shared.lm_head
