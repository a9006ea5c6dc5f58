"""Settings of one worker process, resolved once. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..common.errors import ConfigError
from ..common.role import Role
from ..core.scheduler import TPOT_S, SchedulerConfig
from ..kv.layout import AXIS_ORDERS
from ..kv.wire import WIRE_DTYPES
from ..parallel.rendezvous import PeerGroup

MAX_RANKS = 64
# Enough rows for matrix products to run at full speed: with more, prompts that came together only wait for each other.
DEVICE_BATCH_TOKENS = {"cpu": 768, "fake": 768, "cuda": 8192}
MAX_CORES = 1 << 16


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    model: str  # folder of a Hugging Face checkpoint
    role: str = "mixed"  # "prefill", "decode" or "mixed"
    served_model_name: str | None = None  # None: the folder's name
    dtype: str = "bfloat16"  # or "float32"
    device: str = "cpu"
    threads: int | None = None  # of all its ranks together; None: torch's choice
    cores: tuple[int, ...] | None = None  # that its compute threads are bound to, in order; None: not bound
    quantize: str | None = None  # "int8" or "int4": weights at load
    cpu_isa: str = "auto"  # instruction set of the compiled CPU kernels; "auto": the best; "none": compute with torch
    look_ahead: bool = False  # prepare a step while the one before it is computed: compiled CPU kernels, one rank
    cuda_graphs: bool = True  # on cuda: steps are captured at start, and replayed; False: launched kernel by kernel
    tensor_parallel: int = 1  # ranks: processes that share the model's heads and MLP, on this machine
    expert_parallel: int = 1  # as many: they have whole experts of a mixture, instead of a part of each
    expert_placement: str = "contiguous"  # which: that, "round_robin", or a JSON file of measured loads
    expert_copies: int = 0  # with such a file: experts of each layer that are held once more
    data_parallel: int = 1  # workers that share the experts of a mixture, each with the rest of the model and requests
    data_rank: int = 0  # which of them this one is
    rendezvous: str | None = None  # a folder for this one start of them all, on this machine
    block_size: int = 16  # tokens a block
    kv_memory_bytes: int | None = None  # None: by fraction
    kv_memory_fraction: float = 0.3  # of the memory that is free at start
    max_context_tokens: int | None = None  # None: the model's
    max_batch_tokens: int = 0  # a step's budget; 0: by device, see DEVICE_BATCH_TOKENS
    chunk_tokens: int = 0  # 0: no limit but the budget
    max_running: int = 256
    target_step_s: float | None = None  # of a step with prefill beside running decodes; 0: no matter; None: by load
    tpot_s: float = TPOT_S  # time per token that such a step aims at by load
    ttft_s: float = 1.0  # time to first token that the order of admission aims at
    prefix_cache: bool = True
    transports: tuple[str, ...] | Literal["auto"] = "auto"
    trusted_rdma_fabric: bool = False  # whoever is on it may read and write KV: NIXL uses it between machines
    lease_s: float = 10.0
    kv_axis_order: str = "block"  # or "layer": the outer axis of the KV cache
    wire_dtype: str | None = None  # "bfloat16", "int8": pull KV narrower than the source has it, over gRPC
    verify_kv: bool = False  # compare what was pulled with the source's checksums
    layer_groups: int = 0  # in which a step's KV is handed off; 0: chosen by what reads were measured to cost
    host: str = "127.0.0.1"
    port: int = 0  # 0: the kernel chooses
    auth_token: str | None = None

    def validate(self) -> None:
        """Raise ConfigError, naming the setting, for what cannot work."""
        if self.role not in {r.value for r in Role}:
            raise ConfigError(f"role must be prefill, decode or mixed, got {self.role!r}")
        choices = {
            "dtype": ("bfloat16", "float32"),
            "quantize": ("int8", "int4", None),
            "kv_axis_order": tuple(AXIS_ORDERS),
        }
        for name, values in choices.items():
            if getattr(self, name) not in values:
                raise ConfigError(f"{name} must be {values[0]} or {values[1]}, got {getattr(self, name)!r}")
        if self.wire_dtype not in (None, *WIRE_DTYPES):
            raise ConfigError(f"wire_dtype must be {' or '.join(WIRE_DTYPES)}, got {self.wire_dtype!r}")
        if self.wire_dtype is not None and self.transports != "auto" and "grpc" not in self.transports:
            raise ConfigError(f"wire_dtype {self.wire_dtype} needs the transport grpc, which alone can narrow KV")
        least = {"block_size": 1, "max_batch_tokens": 0, "chunk_tokens": 0, "max_running": 1, "layer_groups": 0}
        least |= {"target_step_s": 0, "tpot_s": 0, "ttft_s": 0}
        for name, low in least.items():
            if (value := getattr(self, name)) is not None and value < low:
                raise ConfigError(f"{name} must be at least {low}, got {value}")
        if self.cores is not None and not (self.cores and all(0 <= core < MAX_CORES for core in self.cores)):
            raise ConfigError(f"cores must be numbers of this machine's CPUs, got {self.cores}")
        self._check_ranks()
        self._check_peers()
        if not 0 < self.kv_memory_fraction <= 0.95:
            raise ConfigError(f"kv_memory_fraction must be in (0, 0.95], got {self.kv_memory_fraction}")
        if self.auth_token is None and self.host not in ("127.0.0.1", "localhost", "::1"):
            raise ConfigError(
                f"a worker on {self.host} needs an auth_token (DIPTYCH_AUTH_TOKEN, or --auth-token-file): without one, "
                "listen on 127.0.0.1"
            )

    def _check_ranks(self) -> None:
        if not 1 <= self.tensor_parallel <= MAX_RANKS:
            raise ConfigError(f"tensor_parallel must be in [1, {MAX_RANKS}], got {self.tensor_parallel}")
        if self.expert_parallel not in (1, self.tensor_parallel):
            raise ConfigError(
                f"expert_parallel must be 1 or tensor_parallel={self.tensor_parallel}, got {self.expert_parallel}"
            )
        if self.expert_copies < 0:
            raise ConfigError(f"expert_copies must be at least 0, got {self.expert_copies}")
        if self.look_ahead and self.tensor_parallel > 1:
            raise ConfigError("look_ahead works with one rank alone: leave it out, or set tensor_parallel to 1")

    def _check_peers(self) -> None:
        size = self.data_parallel
        if not 1 <= size <= MAX_RANKS:
            raise ConfigError(f"data_parallel must be in [1, {MAX_RANKS}], got {size}")
        if not 0 <= self.data_rank < size:
            raise ConfigError(f"data_rank must be in [0, {size - 1}] with data_parallel={size}, got {self.data_rank}")
        if size == 1:
            return
        if not self.rendezvous:
            raise ConfigError(f"data_parallel={size} needs a rendezvous: a folder, the same for all {size} workers")
        if self.tensor_parallel > 1:
            raise ConfigError("data_parallel and tensor_parallel do not work together: set one of them to 1")
        if self.device != "cpu":
            raise ConfigError(f"data_parallel={size} works on cpu alone for now, not on {self.device}: use 1")
        if self.look_ahead:
            raise ConfigError("look_ahead does not work with data_parallel: leave one of them out")

    @property
    def peer_group(self) -> PeerGroup | None:
        """Among the workers that it shares experts with."""
        if self.data_parallel == 1:
            return None
        assert self.rendezvous is not None  # validated
        return PeerGroup(self.data_rank, self.data_parallel, Path(self.rendezvous))

    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(
            self.max_batch_tokens or DEVICE_BATCH_TOKENS[self.device.partition(":")[0]],
            self.chunk_tokens,
            self.max_running,
            target_step_s=self.target_step_s,
            tpot_s=self.tpot_s,
            ttft_s=self.ttft_s,
        )
