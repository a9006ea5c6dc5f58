"""Batch -> tensors -> logits -> tokens: the Runner that computes with torch.

Life: load (config and weights checked, then read; KV memory reserved) -> run, once a step -> close.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..kernels.paged_attention import PagedBatch
from .errors import ConfigError
from .kv_cache import KVCache, available_bytes, plan_num_blocks
from .kv_layout import AXIS_ORDERS, KVLayout, KVMemory
from .models.attention import StepMeta
from .models.decoder import Decoder
from .models.rope import rope_table
from .models.spec import ModelSpec, load_spec
from .models.weights import DTYPES, Checkpoint, Progress
from .runner import LayerWatch, ModelInfo
from .sampler import Sampler
from .sequence import Batch, SampledToken, ScheduledSequence


@dataclass(frozen=True, slots=True)
class ModelRunnerConfig:
    model_path: Path
    dtype: str = "bfloat16"
    device: str = "cpu"
    block_size: int = 16
    kv_axis_order: str = "block"  # or "layer"
    kv_memory_bytes: int | None = None  # None: kv_memory_fraction of what is free once the weights are read
    kv_memory_fraction: float = 0.3
    max_context_tokens: int | None = None  # None: all that the model was made for
    served_model_name: str | None = None  # None: the name of the checkpoint's directory
    num_threads: int | None = None  # None: torch's own choice

    def validate(self) -> None:
        """Raise ConfigError for a value outside its range."""
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.kv_axis_order not in AXIS_ORDERS:
            raise ConfigError(f"kv_axis_order must be block or layer, got {self.kv_axis_order!r}")
        if not 1 <= self.block_size <= 1024:
            raise ConfigError(f"block_size must be in [1, 1024], got {self.block_size}")
        if not 0.0 < self.kv_memory_fraction < 1.0:
            raise ConfigError(f"kv_memory_fraction must be in (0, 1), got {self.kv_memory_fraction}")
        for name in ("kv_memory_bytes", "max_context_tokens", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")


class ModelRunner:
    """A Runner (see runner.py). Make it with `load`."""

    def __init__(self, info: ModelInfo, decoder: Decoder, cache: KVCache) -> None:
        self._info, self._decoder, self._cache = info, decoder, cache
        self._memory = cache.memory
        self._device = cache.tensor.device
        self._cos_sin = rope_table(decoder.spec, info.max_context_tokens, self._device)
        self._sampler = Sampler(info.eos_token_ids)

    @classmethod
    def load(cls, config: ModelRunnerConfig, progress: Progress = lambda _done, _total: None) -> "ModelRunner":
        """Read the checkpoint and reserve KV memory; `progress` hears of bytes read.

        Raises CheckpointError for what is wrong with the checkpoint, ConfigError for what is wrong with `config`.
        """
        config.validate()
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        path, device = Path(config.model_path), _device(config.device)
        spec = load_spec(path)
        max_context_tokens = _max_context_tokens(config, spec)
        with Checkpoint(path, spec) as checkpoint:
            layout = KVLayout(
                dtype=config.dtype,
                block_size=config.block_size,
                num_layers=spec.num_layers,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                model_id=checkpoint.fingerprint(),
                axis_order=AXIS_ORDERS[config.kv_axis_order],
            )
            weights = checkpoint.load(DTYPES[config.dtype], device, progress)
        num_blocks = _num_blocks(config, layout, max_context_tokens, device)
        info = ModelInfo(
            name=config.served_model_name or path.resolve().name,
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            max_context_tokens=max_context_tokens,
            eos_token_ids=spec.eos_token_ids,
            dtype=config.dtype,
        )
        return cls(info, Decoder(spec, weights), KVCache(layout, num_blocks, device))

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def layout(self) -> KVLayout:
        return self._cache.layout

    @property
    def memory(self) -> KVMemory:
        return self._memory

    def close(self) -> None:
        """Nothing is held but memory, which goes with the object."""

    @torch.inference_mode()
    def run(self, batch: Batch, watch: LayerWatch | None = None) -> list[SampledToken]:
        """Compute the batch's new tokens into the cache; one sampled token for each entry that `samples`, in order."""
        if not batch:
            return []
        # Attention wants sequences with one new token first; order is restored by sampling in the batch's own order.
        order = sorted(range(len(batch.entries)), key=lambda i: batch.entries[i].num_new > 1)
        entries = [batch.entries[i] for i in order]
        token_ids, meta = self._inputs(entries)
        hidden = self._decoder.forward(token_ids, self._cache, meta, self._stored(watch))
        last_rows = np.cumsum([e.num_new for e in entries]) - 1
        rows = {id(e): row for e, row in zip(entries, last_rows.tolist(), strict=True)}
        sampled = [e for e in batch.entries if e.samples]
        if not sampled:
            return []
        logits = self._decoder.logits(hidden[self._tensor(np.array([rows[id(e)] for e in sampled]))])
        return self._sampler.sample(logits, [e.sequence for e in sampled])

    def _stored(self, watch: LayerWatch | None) -> Callable[[int], None]:
        """Passes on the layers that `watch` waits for, once the device has really stored them."""
        ends = set(watch.ends if watch else ())

        def stored(num_layers: int) -> None:
            if watch is not None and num_layers in ends:
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
                watch.reached(num_layers)

        return stored

    def _inputs(self, entries: SequenceOf[ScheduledSequence]) -> tuple[Tensor, StepMeta]:
        """(token ids [T] int64, what the layers need)."""
        block_size = self.layout.block_size
        num_new = [e.num_new for e in entries]
        starts = [e.sequence.num_computed for e in entries]
        context_lens = [start + num for start, num in zip(starts, num_new, strict=True)]
        tokens: list[int] = []
        for entry, start, end in zip(entries, starts, context_lens, strict=True):
            tokens += entry.sequence.token_ids[start:end]
        tables = np.zeros((len(entries), max(-(-n // block_size) for n in context_lens)), dtype=np.int32)
        for row, entry, end in zip(tables, entries, context_lens, strict=True):
            num_blocks = -(-end // block_size)
            row[:num_blocks] = entry.sequence.block_table[:num_blocks]
        owner = np.repeat(np.arange(len(entries)), num_new)
        query_starts = np.concatenate(([0], np.cumsum(num_new)))
        positions = np.arange(len(tokens)) - query_starts[owner] + np.array(starts)[owner]
        slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
        paged = PagedBatch(
            block_tables=self._tensor(tables),
            context_lens=self._tensor(np.array(context_lens, dtype=np.int32)),
            query_starts=self._tensor(query_starts.astype(np.int32)),
            host_context_lens=context_lens,
            host_num_new=num_new,
            num_decodes=sum(num == 1 for num in num_new),
            block_size=block_size,
        )
        cos_sin = self._cos_sin[self._tensor(positions)]
        return self._tensor(np.array(tokens)), StepMeta(cos_sin, self._tensor(slots), paged)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise ConfigError(f"device {name!r} is not one that torch knows: use cpu or cuda") from e
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {name!r} is asked for and torch sees no GPU: use cpu, or install a GPU build of torch"
        )
    return device


def _num_blocks(config: ModelRunnerConfig, layout: KVLayout, max_context_tokens: int, device: torch.device) -> int:
    available = available_bytes(device)
    wanted = config.kv_memory_bytes or int(available * config.kv_memory_fraction)
    num_blocks = plan_num_blocks(layout, max_context_tokens, wanted)
    if num_blocks * layout.block_bytes > available:
        raise ConfigError(f"kv_memory_bytes={wanted:,} exceeds the {available:,} bytes that are free: lower it")
    return num_blocks


def _max_context_tokens(config: ModelRunnerConfig, spec: ModelSpec) -> int:
    wanted = config.max_context_tokens or spec.max_position_embeddings
    if wanted > spec.max_position_embeddings:
        raise ConfigError(
            f"max_context_tokens={wanted} exceeds the model's {spec.max_position_embeddings} positions: lower it"
        )
    return wanted
