"""What a ModelRunner computes and where, checked once."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ..common.errors import ConfigError
from ..kv.layout import AXIS_ORDERS
from ..models.checkpoint.weights import DTYPES
from ..models.plan.expert_placement import IN_ORDER
from ..models.plan.formats import QUANTIZE
from ..parallel.rendezvous import PeerGroup


@dataclass(frozen=True, slots=True)
class ModelRunnerConfig:
    model_path: Path
    dtype: str = "bfloat16"
    device: str = "cpu"
    block_size: int = 16
    kv_axis_order: str = "block"  # or "layer"
    kv_memory_bytes: int | None = None  # None: kv_memory_fraction of what is free once the weights are read
    kv_memory_fraction: float = 0.3
    max_context_tokens: int | None = None  # None: the model's max_position_embeddings
    served_model_name: str | None = None  # None: the name of the checkpoint's directory
    num_threads: int | None = None  # of all ranks together; None: torch's own choice
    cores: tuple[int, ...] | None = None  # for the threads of all ranks; None: not bound
    tensor_parallel: int = 1  # ranks
    expert_parallel: int = 1  # as many: they have whole experts; see expert_placement.py for which
    expert_placement: str = IN_ORDER
    expert_copies: int = 0
    peer_group: PeerGroup | None = None  # among workers that share experts, by expert_placement
    quantize: str | None = None  # "int8" or "int4": weights at load
    cpu_isa: str = "auto"  # of the compiled CPU kernels: "auto", the best; "none": compute with torch
    look_ahead: bool = False  # with those, of one rank: compute on a thread of its own, one step ahead
    cuda_graphs: bool = True  # of steps on cuda
    max_running: int = 256  # sequences in a batch on cuda

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
        for name in ("kv_memory_bytes", "max_context_tokens", "num_threads", "max_running"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.quantize is not None and self.quantize not in QUANTIZE:
            raise ConfigError(f"quantize must be {' or '.join(QUANTIZE)}, got {self.quantize!r}")
        if self.tensor_parallel < 1:
            raise ConfigError(f"tensor_parallel must be at least 1, got {self.tensor_parallel}")
        if self.peer_group is not None and (self.tensor_parallel > 1 or not self.device.startswith("cpu")):
            raise ConfigError("workers that share experts have one rank each, on cpu: set tensor_parallel to 1")
        if self.expert_parallel not in (1, self.tensor_parallel):
            raise ConfigError(
                f"expert_parallel must be 1 or tensor_parallel={self.tensor_parallel}, got {self.expert_parallel}"
            )

    @property
    def threads_per_rank(self) -> int | None:
        if self.num_threads is None and self.tensor_parallel == 1:
            return None
        return max((self.num_threads or torch.get_num_threads()) // self.tensor_parallel, 1)
