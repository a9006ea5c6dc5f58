"""Settings of one worker process, checked when they are made. No torch.

    WorkerConfig
    ├── model: ModelConfig              what is computed, and with what
    ├── cache: CacheConfig              the KV cache
    ├── scheduler: SchedulerConfig      what a step computes (core/scheduler_config.py)
    ├── speculation: SpeculationConfig  what is drafted
    ├── parallel: ParallelConfig        ranks and workers that compute together
    ├── handoff: HandoffConfig          how KV moves between workers
    └── telemetry: TelemetryConfig      logs and traces

Users name a setting by its field alone: in flags, in YAML and in `WorkerConfig.of`. No two sections share a name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from types import NoneType
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin

from pydantic import Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ..common.errors import ConfigError
from ..common.settings import LOOPBACK_HOSTS, STRICT, Port, Scope, SettingError, describe
from ..common.tls import LinkTls
from ..core.scheduler_config import SchedulerConfig
from ..kv.dtypes import is_rounded_by_block
from .sections import CacheConfig, HandoffConfig, ModelConfig, ParallelConfig, SpeculationConfig, TelemetryConfig

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "speculation": SpeculationConfig,
    "parallel": ParallelConfig,
    "handoff": HandoffConfig,
    "telemetry": TelemetryConfig,
}
# Enough rows for matrix products to run at full speed: with more, prompts that came together only wait for each other.
DEVICE_BATCH_TOKENS = {"cpu": 768, "fake": 768, "cuda": 8192}
KV_FRACTIONS = {"cpu": 0.3, "fake": 0.3, "cuda": 0.85}  # of a host, the rest is for others
T = TypeVar("T")
Core = Annotated[int, Field(ge=0, lt=1 << 16)]


@dataclass(frozen=True, slots=True, config=STRICT)
class WorkerConfig:
    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    parallel: ParallelConfig = ParallelConfig()
    handoff: HandoffConfig = HandoffConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    role: Annotated[Literal["prefill", "decode", "mixed"], Scope.PROCESS, Field(description="At start.")] = "mixed"
    threads: Annotated[int | None, Field(ge=1, description="Compute threads of each worker.")] = None
    cores: Annotated[
        tuple[Core, ...] | None,
        Scope.PROCESS,
        Field(min_length=1, description="Cores that the compute threads are bound to, in order: 0,1,2."),
    ] = None
    host: Annotated[str, Scope.PROCESS, Field(description="Where it listens.")] = "127.0.0.1"
    port: Annotated[Port, Scope.PROCESS, Field(description="0: any free port.")] = 0
    auth_token: Annotated[str | None, Scope.PROCESS] = None
    tls: Annotated[LinkTls | None, Scope.PROCESS] = None  # of every connection to and from other processes

    @classmethod
    def of(cls, model: Any, **settings: object) -> Self:
        """Build a config from settings by their names alone. `model`: a path. Raises ConfigError."""
        given: dict[str | None, dict[str, Any]] = {section: {} for section in (*SECTIONS, None)}
        for name, value in {"model": str(model), **settings}.items():
            given[SETTINGS[name].section][name] = value
        problems: list[str] = []
        made = {section: _make(kind, given[section], problems) for section, kind in SECTIONS.items()}
        own = _make(cls, made | given[None], problems) if not problems else None
        if own is None:
            raise ConfigError("; ".join(problems))
        return own

    def changed(self, **settings: object) -> Self:
        """Copy with other settings, by their names alone. Raises ConfigError."""
        parts = {section: getattr(self, section) if section else self for section in (*SECTIONS, None)}
        return self.of(**({name: getattr(parts[each.section], name) for name, each in SETTINGS.items()} | settings))

    @model_validator(mode="after")
    def _check(self) -> Self:
        size, ranks = self.parallel.data_parallel, self.parallel.tensor_parallel
        if size > 1 and (ranks > 1 or self.model.look_ahead):
            text = f"({size}) works only without tensor_parallel and look_ahead for now: leave one of them out"
            raise SettingError("data_parallel", text)
        self._check_shared_drafts()
        if self.speculation.has_model and is_rounded_by_block(self.cache.kv_dtype):
            text = f"{self.cache.kv_dtype} does not work with a model that drafts, whose KV lags behind the blocks"
            raise SettingError("kv_dtype", f"{text}: use speculation ngram or suffix, or another kv_dtype")
        if self.num_draft_ranks not in (1, ranks):
            why = "the draft's KV is divided as the model's, or whole on the first rank"
            text = f"must be 1 or tensor_parallel ({ranks}), got {self.num_draft_ranks}: {why}"
            raise SettingError("draft_tensor_parallel", text)
        if self.model.look_ahead and ranks > 1:
            raise SettingError("look_ahead", "works only with one rank: leave it out, or set tensor_parallel to 1")
        if self.auth_token is None and self.host not in LOOPBACK_HOSTS:
            text = "needs an auth_token (DIPTYCH_AUTH_TOKEN, or --auth-token-file): without one, listen on 127.0.0.1"
            raise SettingError("host", f"{self.host} {text}")
        return self

    def _check_shared_drafts(self) -> None:
        """Raise SettingError for drafts that workers which share experts cannot make."""
        is_self, on_cpu = self.speculation.speculation == "self", self.model.device_kind == "cpu"
        if self.parallel.data_parallel > 1 and is_self and on_cpu:
            text = "self does not work with data_parallel on cpu: each pass would need the other workers' experts"
            raise SettingError("speculation", f"{text}; use another method")

    @property
    def kv_dtype(self) -> str:
        """Dtype of the KV cache, of kv/dtypes.py."""
        return self.model.dtype if self.cache.kv_dtype == "auto" else self.cache.kv_dtype

    @property
    def kv_memory_fraction(self) -> float:
        """Fraction of what weights and steps leave that KV gets, where no size is given."""
        given = self.cache.kv_memory_fraction
        return KV_FRACTIONS[self.model.device_kind] if given is None else given

    @property
    def num_draft_ranks(self) -> int:
        """Number of ranks that compute what drafts: the first one alone computes a head."""
        ranks, given = self.parallel.tensor_parallel, self.speculation.draft_tensor_parallel
        return 1 if self.speculation.has_head else given or ranks

    @property
    def device_scheduler(self) -> SchedulerConfig:
        """The scheduler's settings, with the device's step budget where none is given."""
        budget = self.scheduler.max_batch_tokens or DEVICE_BATCH_TOKENS[self.model.device_kind]
        return replace(self.scheduler, max_batch_tokens=budget)


@plain_dataclass(frozen=True, slots=True)
class Setting:
    """Setting of a worker, as flags and YAML name it."""

    name: str
    section: str | None  # None: the worker's own
    field: FieldInfo

    @property
    def scope(self) -> Scope:
        return next((each for each in self.field.metadata if isinstance(each, Scope)), Scope.POOL)

    @property
    def help(self) -> str:
        """Its description, choices and default."""
        text, default = self.field.description or "", self.field.default
        if len(choices := [str(each) for each in _choices(self.field.annotation)]) > 1:
            text = f"{text.removesuffix('.')}: {', '.join(choices)}."
        is_told = self.is_required or default is None or "[default" in text
        return text if is_told or isinstance(default, bool) else f"{text}  [default: {default}]"

    @property
    def is_required(self) -> bool:
        return self.field.default is PydanticUndefined

    @property
    def annotation(self) -> Any:
        """Its type, with its bounds."""
        return Annotated[(self.field.annotation, self.scope, *self.field.metadata)]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_list(self) -> bool:
        return _mentions(self.field.annotation, tuple)

    @property
    def flag_type(self) -> type:
        """Type of the flag's value, or of each item of a list: what has no type of its own is a text."""
        arms = [arm for arm in get_args(self.field.annotation) if arm is not NoneType] or [self.field.annotation]
        if self.is_list:
            return int if _mentions(arms[0], int) else str
        return next((kind for kind in (bool, int, float) if arms == [kind]), str)


def _mentions(annotation: object, kind: type) -> bool:
    return kind in (annotation, get_origin(annotation)) or any(_mentions(each, kind) for each in get_args(annotation))


def _choices(annotation: object) -> list[object]:
    """Values of the first Literal in it."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return next((found for each in get_args(annotation) if (found := _choices(each))), [])


def _settings() -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    kinds: list[tuple[str | None, Any]] = [*SECTIONS.items(), (None, WorkerConfig)]
    for section, kind in kinds:
        fields: Mapping[str, FieldInfo] = kind.__pydantic_fields__
        for name, info in fields.items():
            if section is not None or name not in SECTIONS:
                assert name not in found, f"two settings are called {name}"
                found[name] = Setting(name, section, info)
    return found


SETTINGS = _settings()


def _make(kind: Callable[..., T], given: Mapping[str, Any], problems: list[str]) -> T | None:
    """Make a section of the config. Adds to `problems` what is wrong with it."""
    try:
        return kind(**given)
    except ValidationError as e:
        said: dict[object, str] = {}  # by setting: a union reports an error for each member, and the first is enough
        for problem in e.errors(include_url=False):
            said.setdefault(problem["loc"][:1], _explain(problem))
        problems += said.values()
        return None


def _explain(problem: Mapping[str, Any]) -> str:
    error = problem.get("ctx", {}).get("error")
    return str(error) if isinstance(error, SettingError) else f"{problem['loc'][0]}: {describe(problem)}"
