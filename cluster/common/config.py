"""Settings of one cluster: frozen, checked once, the same in YAML and in flags. Knows no Ray and no process.

    ClusterConfig            the model and what all its workers share
    ├── pools: Pools         prefill, decode, mixed
    │   └── PoolConfig       how many workers, where Ray may place them, what each may use
    ├── router: RouterConfig the front door: addresses, keys, TLS
    └── service_level        what the autoscaler steers by

What is wrong raises ConfigError, naming the key by its path ("pools.prefill.replicas"), the line where a file gave it,
and the key that was probably meant.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
WILDCARD_HOSTS = ("0.0.0.0", "::")
DEFAULT_NAME = "default"
POOL_NAMES = ("prefill", "decode", "mixed")
PoolName = Literal["prefill", "decode", "mixed"]

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(value: object) -> object:
    """'2GiB' -> 2147483648; what is not a text passes through, for pydantic to judge."""
    if not isinstance(value, str):
        return value
    digits = value.strip().rstrip("KMGTIiBbkmgt ")
    unit = value.strip()[len(digits) :].strip().upper()
    try:
        return int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError) as e:
        raise ValueError(f"{value!r} is not a size: write bytes, or a number with MiB, GiB, MB or GB") from e


NumBytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
MAX_REPLICAS = 4096
Count = Annotated[int, Field(ge=0, le=MAX_REPLICAS)]
Port = Annotated[int, Field(ge=0, le=65535)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


Dtype = Literal["bfloat16", "float32"]
Quantize = Literal["int8", "int4"]
CpuIsa = Literal["auto", "none", "portable", "avx2", "avx512", "avx512bf16"]
BlockSize = Annotated[int, Field(ge=1, le=1024)]
AxisOrder = Literal["block", "layer"]
WireDtype = Literal["bfloat16", "int8"]


class PoolConfig(_Settings):
    """One pool: its size, Ray's placement of each worker, and each worker's share of its machine."""

    replicas: Count = 1
    min_replicas: Count | None = None  # with max_replicas: the autoscaler moves the pool between the two
    max_replicas: Count | None = None
    num_cpus: Annotated[float, Field(gt=0)] = 1.0
    num_gpus: Annotated[float, Field(ge=0)] | None = None  # None: on cuda one for each rank
    resources: dict[str, float] = Field(default_factory=dict[str, float])  # Ray custom resources of each worker
    label_selector: dict[str, str] = Field(default_factory=dict[str, str])  # Ray node labels that each worker needs
    cores: Annotated[int, Field(ge=0)] | None = None  # that each worker is bound to; None: its share of this machine
    threads: Annotated[int, Field(ge=1)] | None = None  # None: one a core
    dtype: Dtype | None = None  # None, here and for the next three: the cluster's
    block_size: BlockSize | None = None
    kv_axis_order: AxisOrder | None = None
    wire_dtype: WireDtype | None = None
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1  # ranks of each worker
    expert_parallel: Annotated[int, Field(ge=1, le=64)] = 1  # as many: they hold whole experts of a mixture
    expert_placement: Annotated[str, Field(min_length=1)] = "contiguous"  # "round_robin", or a file of measured loads
    expert_copies: Annotated[int, Field(ge=0)] = 0  # with such a file: experts of a layer that are held once more
    data_parallel: Annotated[int, Field(ge=1, le=64)] = 1  # workers that share a mixture's experts: one replica
    kv_memory_bytes: NumBytes | None = None  # None: kv_memory_fraction of the memory that is free at start
    kv_memory_fraction: Annotated[float, Field(gt=0, le=0.95)] = 0.3
    chunk_tokens: Annotated[int, Field(ge=0)] = 0  # 0: no limit but max_batch_tokens
    max_batch_tokens: Annotated[int, Field(ge=0)] = 0  # 0: by device
    max_running: Annotated[int, Field(ge=1)] = 256
    target_step_s: Annotated[float, Field(ge=0)] | None = None  # with running decodes; 0: no matter; None: by load
    look_ahead: bool = False  # a step is prepared while the one before it is computed: compiled CPU kernels, one rank
    cuda_graphs: bool = True  # on cuda: steps are captured at start, and replayed
    layer_groups: Annotated[int, Field(ge=0)] = 0  # in which a step's KV is handed off; 0: by measured cost

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        low, high = self.bounds
        if not low <= self.replicas <= high:
            raise ValueError(f"replicas ({self.replicas}) must lie in min_replicas..max_replicas ({low}..{high})")
        if self.cores and self.threads and self.threads > self.cores:
            raise ValueError(f"threads ({self.threads}) must not exceed cores ({self.cores}): raise cores, or set 0")
        return self

    @property
    def bounds(self) -> tuple[int, int]:
        low = self.replicas if self.min_replicas is None else self.min_replicas
        return low, self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def autoscaled(self) -> bool:
        low, high = self.bounds
        return low < high


class Pools(_Settings):
    prefill: PoolConfig = PoolConfig(replicas=0)
    decode: PoolConfig = PoolConfig(replicas=0)
    mixed: PoolConfig = PoolConfig(replicas=0)

    def items(self) -> tuple[tuple[PoolName, PoolConfig], ...]:
        return ("prefill", self.prefill), ("decode", self.decode), ("mixed", self.mixed)

    def get(self, name: str) -> PoolConfig:
        assert name in POOL_NAMES
        return getattr(self, name)

    @property
    def targets(self) -> dict[str, int]:
        return {name: pool.replicas for name, pool in self.items()}

    @property
    def num_workers(self) -> int:
        """At first."""
        return sum(pool.replicas * pool.data_parallel for _, pool in self.items())


class TlsConfig(_Settings):
    cert: str  # path of a PEM certificate chain
    key: str  # path of its PEM private key


Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s,*]+)$")]


class RouterConfig(_Settings):
    """The front door. Several routers share one address: by SO_REUSEPORT on one machine, behind a Service on many."""

    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    host: str = "127.0.0.1"
    http_port: Port = 8000  # 0: the kernel chooses
    grpc_port: Port = 50051
    api_key: Annotated[str, Field(min_length=8)] | None = None  # asked of every client
    metrics_key: Annotated[str, Field(min_length=8)] | None = None  # opens /metrics alone; None: api_key does
    cors_origins: Annotated[tuple[Origin, ...], Field(strict=False)] = ()  # whose pages may call the HTTP API
    http_tls: TlsConfig | None = None
    grpc_tls: TlsConfig | None = None
    num_cpus: Annotated[float, Field(gt=0)] = 1.0
    resources: dict[str, float] = Field(default_factory=dict[str, float])
    label_selector: dict[str, str] = Field(default_factory=dict[str, str])
    max_requests: Annotated[int, Field(ge=1)] = 1024  # sequences in flight at one router; more answer 429
    alone_below_tokens: Annotated[int, Field(ge=0)] = 0  # decode workers prefill fewer uncached ones themselves
    max_attempts: Annotated[int, Field(ge=1, le=16)] = 3  # at a request whose workers fail
    migrate: bool = True  # running sequences, away from workers that drain or run short of KV memory
    pull_prefixes: bool = True  # that another worker has cached, where that is cheaper than computing them
    worker_timeout_s: Annotated[float, Field(gt=0)] = 5.0  # a worker silent for that long is lost
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0  # the longest that a request may ask for
    strict: bool = False  # requests with unknown fields are refused
    max_connections: Annotated[int, Field(ge=1)] = 4096  # here and for the next: of each port of each router
    max_connections_per_address: Annotated[int, Field(ge=1)] = 2048
    max_header_bytes: Annotated[int, Field(ge=1024, le=1 << 20)] = 16 << 10
    header_timeout_s: Annotated[float, Field(gt=0)] = 10.0  # for the TLS handshake, and for a request's headers
    body_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    idle_timeout_s: Annotated[float, Field(gt=0)] = 75.0  # of a connection without a request
    send_timeout_s: Annotated[float, Field(gt=0)] = 30.0  # of a client that does not read

    @model_validator(mode="after")
    def _check_exposure(self) -> Self:
        if self.host not in LOOPBACK_HOSTS and self.api_key is None:
            raise ValueError(f"host {self.host} can be reached from other machines: set api_key, or keep 127.0.0.1")
        if self.http_port == self.grpc_port != 0:
            raise ValueError(f"http_port and grpc_port are both {self.http_port}: give them different ports")
        if self.replicas > 1 and 0 in (self.http_port, self.grpc_port):
            raise ValueError("several routers share their ports: name http_port and grpc_port instead of 0")
        return self


class ServiceLevel(_Settings):
    """What users are promised, and what the autoscaler steers by."""

    ttft_s: Annotated[float, Field(gt=0)] = 1.0  # time to first token
    tpot_s: Annotated[float, Field(gt=0)] = 0.1  # time per output token


class ClusterConfig(_Settings):
    """One model served on pools of workers."""

    model: Annotated[str, Field(min_length=1)]  # folder of a Hugging Face checkpoint, the same on every machine
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")] = DEFAULT_NAME
    served_model_name: Annotated[str, Field(min_length=1)] | None = None
    dtype: Dtype = "bfloat16"
    device: str = "cpu"
    quantize: Quantize | None = None  # weights at load
    cpu_isa: CpuIsa = "auto"  # instruction set of the compiled CPU kernels; "auto": the best; "none": torch computes
    block_size: BlockSize = 16  # tokens a block
    kv_axis_order: AxisOrder = "block"  # the outer axis of the KV cache
    wire_dtype: WireDtype | None = None  # workers pull KV narrower than it is at the source, over gRPC
    verify_kv: bool = False  # workers compare what they pulled with the source's checksums
    max_context_tokens: Annotated[int, Field(ge=1)] | None = None  # None: the model's
    prefix_cache: bool = True
    transports: Literal["auto"] | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = "auto"
    trusted_rdma_fabric: bool = False  # whoever is on it may read and write KV: NIXL uses it between machines
    lease_s: Annotated[float, Field(gt=0)] = 10.0  # how long a source keeps KV for a silent sink
    drain_timeout_s: Annotated[float, Field(gt=0)] = 600.0  # then a leaving worker is stopped with what still runs
    dashboard: bool = False
    pools: Pools = Pools(prefill=PoolConfig(), decode=PoolConfig())
    router: RouterConfig = RouterConfig()
    service_level: ServiceLevel = ServiceLevel()

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        check_targets(self.pools.targets)
        for name, pool in self.pools.items():
            if pool.tensor_parallel > 1 and self.is_on_gpus and self.gpus_of(pool) < pool.tensor_parallel:
                raise ValueError(
                    f"pools.{name}.num_gpus ({self.gpus_of(pool):g}) is less than its tensor_parallel "
                    f"({pool.tensor_parallel}), and each rank has a GPU of its own: leave num_gpus out"
                )
            if pool.expert_parallel not in (1, pool.tensor_parallel):
                raise ValueError(
                    f"pools.{name}.expert_parallel must be 1 or its tensor_parallel ({pool.tensor_parallel}), got "
                    f"{pool.expert_parallel}"
                )
            if pool.data_parallel > 1 and (pool.tensor_parallel > 1 or pool.look_ahead or self.device != "cpu"):
                raise ValueError(
                    f"pools.{name}.data_parallel ({pool.data_parallel}) works on cpu alone for now, without "
                    "tensor_parallel and look_ahead: leave one of them out"
                )
        return self

    @property
    def is_on_gpus(self) -> bool:
        return self.device.partition(":")[0] == "cuda"

    def gpus_of(self, pool: PoolConfig) -> float:
        """What Ray reserves for each of its workers."""
        if pool.num_gpus is not None:
            return pool.num_gpus
        return float(pool.tensor_parallel) if self.is_on_gpus else 0.0


def check_targets(targets: dict[str, int]) -> None:
    """Raise ValueError unless the pools together can answer a request."""
    if targets.get("decode", 0) + targets.get("mixed", 0) < 1:
        raise ValueError(
            "the decode and mixed pools are both empty, so no worker would generate: give one of them a replica"
        )


def interchangeable(pools: Pools) -> list[frozenset[str]]:
    """Groups of pools whose workers differ in their role alone, so that a worker may move between them."""
    groups: dict[str, set[str]] = {}
    for name, pool in pools.items():
        settings = pool.model_dump_json(exclude={"replicas", "min_replicas", "max_replicas"})
        groups.setdefault(settings, set()).add(name)
    return [frozenset(group) for group in groups.values() if len(group) > 1]
