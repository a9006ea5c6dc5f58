"""Settings of one cluster: frozen, checked once, the same in YAML and in flags. Knows no Ray and no process.

    ClusterConfig            settings that all workers share, and the cluster's own
    ├── pools: Pools         prefill, decode, mixed
    │   └── PoolConfig       settings in which its workers differ, how many there are, where Ray may place them
    ├── router: RouterConfig the front door: addresses, keys, TLS
    ├── service_level        what the autoscaler steers by, and the levels of tiers
    └── served_models        names that the model is served by, each with a level of its own

What a worker can be set to stands in workers/config alone: its keys here are generated from there, by their scope, and
its rules are checked there.

What is wrong raises ConfigError, naming the key by its path ("pools.prefill.replicas"), the line where a file gave it,
and the key that was probably meant.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, field_validator, model_validator

from ...workers.common.errors import ConfigError
from ...workers.common.request import TPOT_BOUNDS_S, TTFT_BOUNDS_S
from ...workers.common.settings import LOOPBACK_HOSTS, STRICT, Port, Scope
from ...workers.config.sections import ParallelConfig
from ...workers.config.worker_config import SETTINGS, WorkerConfig

WILDCARD_HOSTS = ("0.0.0.0", "::")
DEFAULT_NAME = "default"
POOL_NAMES = ("prefill", "decode", "mixed")
AT_START = "(named at start)"  # stands for a rendezvous, which differs for each start of a gang
PLACED_AT_START = "named-at-start:{}"  # and this for a rank host
PoolName = Literal["prefill", "decode", "mixed"]
ToolParser = Literal[
    "auto",
    "none",
    "hermes",
    "qwen3_xml",
    "llama3_json",
    "pythonic",
    "mistral",
    "mistral_v11",
    "deepseek_v3",
    "deepseek_v31",
    "harmony",
    "kimi_k2",
    "glm45",
]
ReasoningParser = Literal["auto", "none", "think", "magistral"]

MAX_REPLICAS = 4096
WAIT_S, START_WAIT_S = 30.0, 300.0  # for a worker; for one that is started for the request
MAX_TIERS, MAX_SERVED_MODELS = 16, 64  # they are label values of metrics
USUAL_TIERS = frozenset({"auto", "default"})
Admission = Literal["wait", "refuse"]
Count = Annotated[int, Field(ge=0, le=MAX_REPLICAS)]


class _Settings(BaseModel):
    model_config = STRICT | ConfigDict(frozen=True)


def _worker_settings(name: str, *scopes: Scope) -> type[_Settings]:
    """A class with the workers' settings of these scopes. In a pool, those of the cluster default to the cluster's."""
    fields: dict[str, Any] = {}
    for setting in SETTINGS.values():
        if setting.scope is Scope.BOTH and Scope.POOL in scopes:
            fields[setting.name] = (setting.annotation | None, None)
        elif setting.scope in (*scopes, Scope.BOTH):
            fields[setting.name] = (setting.annotation, ... if setting.is_required else setting.field.default)
    return create_model(name, __base__=_Settings, **fields)


def _given(settings: _Settings, section: str | None = None) -> dict[str, Any]:
    """The workers' settings among these, or those of one section."""
    found: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        if setting.scope is not Scope.PROCESS and section in (None, setting.section):
            value = getattr(settings, name, None)
            found |= {name: value} if value is not None else {}
    return found


def _known_at_start(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for the settings that each start of a worker gets."""
    num_hosts = settings.get("machines_per_worker", 1) - 1
    return {"rendezvous": AT_START, "rank_hosts": tuple(PLACED_AT_START.format(i + 1) for i in range(num_hosts))}


class PoolConfig(_worker_settings("PoolSettings", Scope.POOL)):
    """Settings of a pool: its size, where Ray may place its workers, and in which settings they differ."""

    replicas: Count = 1
    min_replicas: Count | None = None  # with max_replicas: the autoscaler moves the pool between the two
    max_replicas: Count | None = None
    scale_to_zero_after_s: Annotated[float, Field(gt=0)] = 300.0  # without requests, where min_replicas is 0
    num_cpus: Annotated[float, Field(gt=0)] = 1.0
    num_gpus: Annotated[float, Field(ge=0)] | None = None  # None: on cuda one for each rank
    resources: dict[str, float] = Field(default_factory=dict[str, float])  # Ray custom resources of each worker
    label_selector: dict[str, str] = Field(default_factory=dict[str, str])  # Ray node labels that each worker needs
    cores: Annotated[int, Field(ge=0)] | None = None  # that each worker is bound to; None: its share of the machine

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        low, high = self.bounds
        if not low <= self.replicas <= high:
            raise ValueError(f"replicas ({self.replicas}) must lie in min_replicas..max_replicas ({low}..{high})")
        threads: int | None = _given(self).get("threads")
        if self.cores and threads and threads > self.cores:
            raise ValueError(f"threads ({threads}) must not exceed cores ({self.cores}): raise cores, or set 0")
        return self

    @property
    def bounds(self) -> tuple[int, int]:
        low = self.replicas if self.min_replicas is None else self.min_replicas
        return low, self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def parallel(self) -> ParallelConfig:
        """Its ranks, less what the cluster says or each start of a worker."""
        given = _given(self, "parallel")
        return ParallelConfig(**given, **_known_at_start(given), trusted_network=True)

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
    def may_be_empty(self) -> bool:
        """Return whether all workers that answer may leave while there are no requests."""
        return not (self.decode.bounds[0] or self.mixed.bounds[0])

    @property
    def num_workers(self) -> int:
        """Number of workers at the start."""
        return sum(pool.replicas * pool.parallel.data_parallel for _, pool in self.items())


class TlsConfig(_Settings):
    cert: str  # path of a PEM certificate chain
    key: str  # path of its PEM private key


Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s,*]+)$")]


class LinkTlsConfig(TlsConfig):
    ca: str  # path of the PEM certificates of the authority of all peers


class RouterConfig(_Settings):
    """The front door. Several routers share one address: by SO_REUSEPORT on one machine, behind a Service on many."""

    replicas: Annotated[int, Field(ge=0, le=64)] = 1  # that the supervisor starts; 0: `diptych router` does
    host: str = "127.0.0.1"
    http_port: Port = 8000  # 0: the kernel chooses
    grpc_port: Port = 50051
    api_key: Annotated[str, Field(min_length=8)] | None = None  # asked of every client
    api_keys_file: Annotated[str, AfterValidator(os.path.abspath)] | None = None  # further keys, with names
    metrics_key: Annotated[str, Field(min_length=8)] | None = None  # for /metrics, /dashboard/data; None: api_key
    cors_origins: Annotated[tuple[Origin, ...], Field(strict=False)] = ()  # whose pages may call the HTTP API
    http_tls: TlsConfig | None = None
    grpc_tls: TlsConfig | None = None
    num_cpus: Annotated[float, Field(gt=0)] = 1.0
    resources: dict[str, float] = Field(default_factory=dict[str, float])
    label_selector: dict[str, str] = Field(default_factory=dict[str, str])
    max_requests: Annotated[int, Field(ge=1)] = 1024  # sequences in flight at one router; more answer 429
    predict: bool = True  # routes by predicted times and the service level; False: by roles
    max_attempts: Annotated[int, Field(ge=1, le=16)] = 3  # at a request whose workers fail
    migrate: bool = True  # running sequences, away from workers that drain or run short of KV memory
    split_prompts: bool = False  # between two workers, where that is predicted to spare misses of the service level
    pull_prefixes: bool = True  # that another worker has cached, where that is cheaper than computing them
    vllm_metrics: bool = True  # /metrics shows some metrics by vLLM's names too
    worker_wait_s: Annotated[float, Field(gt=0)] | None = None  # for a worker; None: 30, or 300 if none may run
    worker_timeout_s: Annotated[float, Field(gt=0)] = 5.0  # a worker that sends nothing for this time is lost
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0  # the longest that a request may ask for
    strict: bool = False  # requests with unknown fields are refused
    tool_parser: ToolParser = "auto"  # format of the model's calls of tools; auto: as its chat template shows
    reasoning_parser: ReasoningParser = "auto"  # marks of its thoughts
    max_connections: Annotated[int, Field(ge=1)] = 4096  # here and for the next: of each port of each router
    max_connections_per_address: Annotated[int, Field(ge=1)] = 2048
    max_header_bytes: Annotated[int, Field(ge=1024, le=1 << 20)] = 16 << 10
    header_timeout_s: Annotated[float, Field(gt=0)] = 10.0  # for the TLS handshake, and for a request's headers
    body_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    idle_timeout_s: Annotated[float, Field(gt=0)] = 75.0  # of a connection without a request
    send_timeout_s: Annotated[float, Field(gt=0)] = 30.0  # of a client that does not read
    max_kept_responses: Annotated[int, Field(ge=1)] = 16_384  # of the Responses API, here and for the next two
    max_kept_response_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    kept_response_lifetime_s: Annotated[float, Field(gt=0)] = 3600.0  # since the last use

    @model_validator(mode="after")
    def _check_exposure(self) -> Self:
        if self.host not in LOOPBACK_HOSTS and self.api_key is None and self.api_keys_file is None:
            raise ValueError(
                f"host {self.host} can be reached from other machines: set api_key or api_keys_file, or keep 127.0.0.1"
            )
        if self.http_port == self.grpc_port != 0:
            raise ValueError(f"http_port and grpc_port are both {self.http_port}: give them different ports")
        if self.replicas > 1 and 0 in (self.http_port, self.grpc_port):
            raise ValueError("several routers share their ports: name http_port and grpc_port instead of 0")
        return self


class NamedLevel(_Settings):
    """Service level of a tier or of a model name. None: the level that it refines."""

    ttft_s: Annotated[float, Field(ge=TTFT_BOUNDS_S[0], le=TTFT_BOUNDS_S[1])] | None = None
    tpot_s: Annotated[float, Field(ge=TPOT_BOUNDS_S[0], le=TPOT_BOUNDS_S[1])] | None = None
    admission: Admission | None = None


TierName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
ServedName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]


class ServiceLevel(_Settings):
    """Latencies that users are promised; the autoscaler aims at them."""

    ttft_s: Annotated[float, Field(gt=0)] = 1.0  # time to first token
    tpot_s: Annotated[float, Field(gt=0)] = 0.1  # time per output token
    admission: Admission = "wait"  # of a request that is predicted to miss its level
    tiers: Annotated[dict[TierName, NamedLevel], Field(max_length=MAX_TIERS)] = Field(
        default_factory=dict[str, NamedLevel]
    )  # by OpenAI's service_tier

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        if usual := USUAL_TIERS & self.tiers.keys():
            raise ValueError(
                f"tiers must not name {' and '.join(sorted(usual))}: these are the level of the model name, or the "
                "cluster's"
            )
        return self


class ClusterConfig(_worker_settings("SharedSettings", Scope.CLUSTER)):
    """Settings of a cluster: a model served on pools of workers, which share the settings given here."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")] = DEFAULT_NAME
    start_timeout_s: Annotated[float, Field(gt=0)] = 3600.0  # of a worker or router, once it is placed; then replaced
    drain_timeout_s: Annotated[float, Field(gt=0)] = 600.0  # then a leaving worker is stopped with what still runs
    dashboard: bool = False
    tls: LinkTlsConfig | Literal["off", "auto"] = "off"  # between the cluster's own processes
    dial: bool | None = None  # move prefill budgets between workers that may change places, by load; None: see has_dial
    pools: Pools = Pools(prefill=PoolConfig(), decode=PoolConfig())
    router: RouterConfig = RouterConfig()
    service_level: ServiceLevel = ServiceLevel()
    served_models: Annotated[dict[ServedName, NamedLevel], Field(max_length=MAX_SERVED_MODELS)] = Field(
        default_factory=dict[str, NamedLevel]
    )  # names in addition to the checkpoint's, with their service levels

    @field_validator("tls", mode="before")
    @classmethod
    def _read_off(cls, given: object) -> object:
        return "off" if given is False else given  # YAML reads the word as a boolean

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        check_targets(self.pools.targets)
        self._check_zero()
        self._checked(None)
        if self.dial and not self.router.predict:
            raise ValueError(
                "dial moves prefill budgets for routes by predicted times, which router.predict: false turns off: "
                "leave router.predict out, or dial"
            )
        for name, pool in self.pools.items():
            ranks = self._checked(name).parallel.tensor_parallel
            _check_machines(name, pool, self.gpus_of(pool))
            if ranks > 1 and self.is_on_gpus and self.gpus_of(pool) < ranks:
                raise ValueError(
                    f"pools.{name}.num_gpus ({self.gpus_of(pool):g}) is less than its tensor_parallel ({ranks}), and "
                    "each rank has a GPU of its own: leave num_gpus out"
                )
            if pool.parallel.data_parallel > 1 and self.is_on_gpus and self.gpus_of(pool) < 1:
                raise ValueError(
                    f"pools.{name}.num_gpus ({self.gpus_of(pool):g}) is less than 1, and workers that share experts "
                    "(data_parallel) have a GPU each: leave num_gpus out"
                )
        return self

    def _check_zero(self) -> None:
        if self.pools.may_be_empty and self.pools.prefill.bounds[0]:
            raise ValueError(
                "the decode and mixed pools may have no workers (min_replicas: 0), so the prefill pool must not keep "
                "some, which would answer alone: set pools.prefill.min_replicas to 0, or that of decode or mixed to 1"
            )

    def _checked(self, pool: str | None) -> WorkerConfig:
        try:
            return self.worker(pool)
        except ConfigError as e:
            raise ValueError(f"pools.{pool}.{e.message}" if pool else e.message) from e

    @property
    def has_dial(self) -> bool:
        """True where prefill budgets move: without the setting, where routes are chosen by predicted times."""
        return self.router.predict if self.dial is None else self.dial

    @property
    def shared(self) -> WorkerConfig:
        """Settings that all workers share, those included in which pools differ."""
        return self.worker(None)

    def worker(self, pool: str | None) -> WorkerConfig:
        """Settings of each worker of a pool, less what is each process's own. Raises ConfigError."""
        settings = _given(self) | (_given(self.pools.get(pool)) if pool else {})
        return WorkerConfig.of(**settings, **_known_at_start(settings))

    @property
    def worker_wait_s(self) -> float:
        """Longest time that a request waits for a worker, which may have to be started first."""
        return self.router.worker_wait_s or (START_WAIT_S if self.pools.may_be_empty else WAIT_S)

    @property
    def is_on_gpus(self) -> bool:
        return self.shared.model.device_kind == "cuda"

    def gpus_of(self, pool: PoolConfig) -> float:
        """Return the number of GPUs that Ray reserves for each worker of the pool."""
        if pool.num_gpus is not None:
            return pool.num_gpus
        return float(pool.parallel.tensor_parallel) if self.is_on_gpus else 0.0


def _check_machines(name: str, pool: PoolConfig, num_gpus: float) -> None:
    """Raise ValueError unless each machine of a worker can have an equal part of what the worker has."""
    machines = pool.parallel.machines_per_worker
    for key, amount in (("num_gpus", num_gpus), ("cores", pool.cores or 0)):
        if machines > 1 and amount % machines:
            raise ValueError(
                f"pools.{name}.{key} ({amount:g}) must be a multiple of its machines_per_worker ({machines}), each of "
                "which has an equal part: change one of them, or leave it out"
            )


def check_targets(targets: dict[str, int]) -> None:
    """Raise ValueError unless the pools together can answer a request."""
    if targets.get("decode", 0) + targets.get("mixed", 0) < 1:
        raise ValueError(
            "the decode and mixed pools are both empty, so no worker would generate tokens: give one of them a replica"
        )


def scaled(pools: Pools, before: Mapping[str, int], replicas: Mapping[str, int]) -> dict[str, int]:
    """Return the targets of all pools, `before`, with those of `replicas`. Raises ConfigError."""
    for name, number in replicas.items():
        if name not in POOL_NAMES:
            raise ConfigError(f"there is no pool {name!r}; pools: {', '.join(POOL_NAMES)}")
        low, high = pools.get(name).bounds
        if low < high:
            raise ConfigError(
                f"pool {name} is scaled automatically between {low} and {high}: change min_replicas or max_replicas"
            )
        if not 0 <= number <= MAX_REPLICAS:
            raise ConfigError(f"{name}={number}: a pool has between 0 and {MAX_REPLICAS} workers")
    wanted = dict(before) | dict(replicas)
    try:
        if not pools.may_be_empty:
            check_targets(wanted)
    except ValueError as e:
        raise ConfigError(str(e)) from e
    return wanted


def interchangeable(pools: Pools) -> list[frozenset[str]]:
    """Groups of pools whose workers differ in their role alone, so that a worker may move between them."""
    groups: dict[str, set[str]] = {}
    for name, pool in pools.items():
        settings = pool.model_dump_json(exclude={"replicas", "min_replicas", "max_replicas", "scale_to_zero_after_s"})
        groups.setdefault(settings, set()).add(name)
    return [frozenset(group) for group in groups.values() if len(group) > 1]
