"""The sections of a worker's settings; the scheduler's stands beside the scheduler. No torch.

The text of a field is its help: flags show it. docs/configuration.md says more.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from ..common.settings import STRICT, HostAndPort, NumBytes, NumRanks, Scope, SettingError
from ..core.drafting import MAX_DRAFT_TOKENS
from ..parallel.rendezvous import PeerGroup
from ..telemetry.logs import LogFormat
from ..telemetry.settings import TraceSettings, trace_settings

MIN_SPARSE_BLOCKS = 4  # of a budget: the first block, the two newest, and one that is chosen
Transports = Literal["auto"] | Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


@dataclass(frozen=True, slots=True, config=STRICT)
class ModelConfig:
    """Settings of the model: what is computed, and with what."""

    model: Annotated[
        str, Scope.CLUSTER, Field(min_length=1, description="Folder of a Hugging Face checkpoint, or a GGUF file.")
    ]
    served_model_name: Annotated[
        str | None,
        Scope.CLUSTER,
        Field(min_length=1, description="What clients call the model.  [default: the folder's name]"),
    ] = None
    dtype: Annotated[Literal["bfloat16", "float32"], Scope.BOTH, Field(description="Type of numbers.")] = "bfloat16"
    device: Annotated[str, Scope.CLUSTER, Field(description="cpu or cuda.")] = "cpu"
    quantize: Annotated[
        Literal["int8", "int4", "fp8", "w8a8", "mxfp4"] | None, Scope.CLUSTER, Field(description="Weights at load.")
    ] = None
    cpu_isa: Annotated[
        Literal["auto", "none", "portable", "avx2", "avx512", "avx512bf16", "amx"],
        Scope.CLUSTER,
        Field(description="Instruction set of the compiled CPU kernels (auto: the best; none: torch computes)."),
    ] = "auto"
    max_context_tokens: Annotated[
        int | None, Scope.CLUSTER, Field(ge=1, description="Longest sequence.  [default: the model's]")
    ] = None
    share_cores: Annotated[
        bool, Field(description="On CPU: lend cores to other workers of the machine while idle, and borrow theirs.")
    ] = False
    look_ahead: Annotated[bool, Field(description="Prepare a step while the one before it is computed, on CPU.")] = (
        False
    )
    step_log: Annotated[
        str | None,
        Field(min_length=1, description="Folder for a log of each worker's steps, for `diptych profile`."),
    ] = None
    cuda_graphs: Annotated[bool, Field(description="On cuda: capture steps at start, and replay them.")] = True

    @property
    def name(self) -> str:
        """Name by which clients call the model."""
        return self.served_model_name or Path(self.model).resolve().name

    @property
    def device_kind(self) -> str:
        """The device without its number."""
        return self.device.partition(":")[0]


@dataclass(frozen=True, slots=True, config=STRICT)
class CacheConfig:
    """The KV cache."""

    block_size: Annotated[int, Scope.BOTH, Field(ge=1, le=1024, description="Tokens of a KV block.")] = 16
    kv_dtype: Annotated[
        Literal["auto", "int8", "fp8", "int4", "kivi"],
        Scope.BOTH,
        Field(description="Type of the numbers in the KV cache (auto: as dtype)."),
    ] = "auto"
    kv_axis_order: Annotated[
        Literal["block", "layer"], Scope.BOTH, Field(description="Outer axis of the KV cache.")
    ] = "block"
    kv_memory_bytes: Annotated[NumBytes | None, Field(description="KV cache of each worker, as 2GiB.")] = None
    kv_memory_fraction: Annotated[
        float | None,
        Field(gt=0, le=0.95, description="Of the memory that weights and steps leave.  [default: 0.3; on cuda 0.85]"),
    ] = None
    prefix_cache: Annotated[bool, Scope.CLUSTER, Field(description="Keep the KV of common prefixes.")] = True
    sparse_attention: Annotated[
        Literal["none", "quest"], Field(description="Decode long contexts from the KV blocks that matter most.")
    ] = "none"
    sparse_budget_tokens: Annotated[
        int, Field(ge=1, description="With sparse_attention: tokens that a decode attends to, of a longer context.")
    ] = 2048
    sparse_by_default: Annotated[
        bool, Field(description="With sparse_attention: for requests too that do not ask for it.")
    ] = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        least = MIN_SPARSE_BLOCKS * self.block_size
        if self.sparse_attention != "none" and self.sparse_budget_tokens < least:
            text = f"must be at least {MIN_SPARSE_BLOCKS} blocks ({least} tokens), got {self.sparse_budget_tokens}"
            raise SettingError("sparse_budget_tokens", text)
        if self.sparse_attention != "none" and self.kv_dtype != "auto":
            text = f"{self.kv_dtype} does not work with sparse_attention, which keeps bounds of full-width keys"
            raise SettingError("kv_dtype", f"{text}: leave one of them out")
        return self

    @property
    def sparse_budget(self) -> int:
        """Tokens that a decode attends to; 0: all."""
        return 0 if self.sparse_attention == "none" else self.sparse_budget_tokens


@dataclass(frozen=True, slots=True, config=STRICT)
class SpeculationConfig:
    """Speculation: tokens that are drafted, and verified together in one step."""

    speculation: Annotated[
        Literal["none", "ngram", "suffix", "draft", "self", "eagle3", "mtp"],
        Field(description="Draft tokens, by earlier text or by a model, and verify them in one step."),
    ] = "none"
    draft_model: Annotated[
        str | None,
        Field(min_length=1, description="Folder of the model that drafts, or of its head (draft, eagle3, mtp)."),
    ] = None
    draft_tensor_parallel: Annotated[
        int | None, Field(ge=1, description="Ranks that compute a draft model: 1, or all.  [default: tensor_parallel]")
    ] = None
    skipped_layers: Annotated[
        str | None, Field(min_length=1, description="JSON file of the layers that are skipped (speculation self).")
    ] = None
    max_draft_tokens: Annotated[
        int, Field(ge=1, le=MAX_DRAFT_TOKENS, description="Drafted tokens of a sequence in a step, at most.")
    ] = 8
    min_draft_acceptance: Annotated[
        float, Field(ge=0, lt=1, description="Tokens that are accepted with a smaller probability are not drafted.")
    ] = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, needing, using in (
            ("draft_model", ("draft", "eagle3"), ("mtp",)),
            ("draft_tensor_parallel", (), ("draft",)),
            ("skipped_layers", ("self",), ()),
        ):
            is_given, is_used = getattr(self, name) is not None, self.speculation in (*needing, *using)
            if self.speculation in needing and not is_given:
                raise SettingError(name, f"is missing: speculation {self.speculation} needs it")
            if is_given and not is_used:
                raise SettingError(name, f"is given, but speculation {self.speculation} does not use it: leave it out")
        return self

    @property
    def has_model(self) -> bool:
        """Return whether a model drafts."""
        return self.speculation in ("draft", "self", "eagle3", "mtp")

    @property
    def has_head(self) -> bool:
        """Return whether a head drafts, which reads the hidden states of the model that is served."""
        return self.speculation in ("eagle3", "mtp")


@dataclass(frozen=True, slots=True, config=STRICT)
class ParallelConfig:
    """Ranks of one worker, the machines that they are on, and workers that share the experts of a mixture."""

    tensor_parallel: Annotated[NumRanks, Field(description="Ranks of each worker.")] = 1
    machines_per_worker: Annotated[
        NumRanks, Field(description="Machines that a worker's ranks are on, as many on each; needs trusted_network.")
    ] = 1
    rank_hosts: Annotated[
        tuple[HostAndPort, ...],
        Scope.PROCESS,
        Field(description="HOST:PORT of the rank host on each machine but the worker's, in order: A:1,B:2."),
    ] = ()
    trusted_network: Annotated[
        bool,
        Scope.CLUSTER,
        Field(description="Let ranks on several machines connect: whoever is on that network can read and change it."),
    ] = False
    expert_parallel: Annotated[NumRanks, Field(description="As many: ranks hold whole experts.")] = 1
    expert_placement: Annotated[
        str, Field(min_length=1, description="contiguous, round_robin, or a JSON file of measured loads.")
    ] = "contiguous"
    expert_copies: Annotated[
        int, Field(ge=0, description="With such a file: experts of a layer that are held once more.")
    ] = 0
    data_parallel: Annotated[NumRanks, Field(description="Workers that share the experts of a mixture.")] = 1
    data_rank: Annotated[int, Scope.PROCESS, Field(ge=0, description="Which of them this one is.")] = 0
    rendezvous: Annotated[
        str | None,
        Scope.PROCESS,
        Field(description="Folder on this machine through which they connect, a new one for each start."),
    ] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        size = self.data_parallel
        if self.expert_parallel not in (1, self.tensor_parallel):
            text = f"must be 1 or tensor_parallel ({self.tensor_parallel}), got {self.expert_parallel}"
            raise SettingError("expert_parallel", text)
        self._check_machines()
        if self.data_rank >= size:
            text = f"must be in [0, {size - 1}] with data_parallel={size}, got {self.data_rank}"
            raise SettingError("data_rank", text)
        if size > 1 and not self.rendezvous:
            raise SettingError("data_parallel", f"({size}) needs a rendezvous: one folder for all {size} workers")
        return self

    def _check_machines(self) -> None:
        machines, ranks, hosts = self.machines_per_worker, self.tensor_parallel, self.rank_hosts
        if machines > 1 and self.data_parallel > 1:
            text = f"({machines}) does not work with data_parallel, whose workers are on one machine: leave one out"
            raise SettingError("machines_per_worker", text)
        if ranks % machines:
            text = f"must divide tensor_parallel ({ranks}), for each machine has as many ranks, got {machines}"
            raise SettingError("machines_per_worker", text)
        if machines > 1 and not self.trusted_network:
            text = (
                f"({machines}) needs trusted_network: ranks on several machines send each other what they compute "
                "without encryption and ask for no token. Set trusted_network where nobody else is on their network"
            )
            raise SettingError("machines_per_worker", text)
        if len(hosts) != machines - 1:
            text = f"must name {machines - 1} (machines_per_worker - 1), got {len(hosts)}"
            raise SettingError("rank_hosts", text)
        if len(set(hosts)) < len(hosts):
            raise SettingError("rank_hosts", f"must differ, for each serves one worker, got {','.join(hosts)}")

    @property
    def ranks_per_machine(self) -> int:
        return self.tensor_parallel // self.machines_per_worker

    @property
    def peer_group(self) -> PeerGroup | None:
        """The workers that this one shares experts with."""
        if self.data_parallel == 1:
            return None
        assert self.rendezvous is not None  # checked
        return PeerGroup(self.data_rank, self.data_parallel, Path(self.rendezvous))


@dataclass(frozen=True, slots=True, config=STRICT)
class HandoffConfig:
    """Settings of the hand-off: how KV moves between workers."""

    transports: Annotated[Transports, Scope.CLUSTER, Field(description="How KV travels, best first.")] = "auto"
    trusted_rdma_fabric: Annotated[
        bool,
        Scope.CLUSTER,
        Field(description="Use NIXL between machines: whoever is on that fabric can read and write KV."),
    ] = False
    lease_s: Annotated[
        float, Scope.CLUSTER, Field(gt=0, description="Seconds that a source keeps KV for a silent sink.")
    ] = 10.0
    wire_dtype: Annotated[
        Literal["bfloat16", "int8", "fp8", "int4"] | None,
        Scope.BOTH,
        Field(description="Pull KV narrower than the source has it, over gRPC."),
    ] = None
    verify_kv: Annotated[bool, Scope.CLUSTER, Field(description="Check by checksums what hand-offs bring.")] = False
    layer_groups: Annotated[
        int, Field(ge=0, description="In how many groups of layers KV is handed off; 0: by cost.")
    ] = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.wire_dtype is not None and self.transports != "auto" and "grpc" not in self.transports:
            raise SettingError(
                "wire_dtype",
                f"{self.wire_dtype} needs the transport grpc, the only one that can convert KV: add it to transports",
            )
        return self


@dataclass(frozen=True, slots=True, config=STRICT)
class TelemetryConfig:
    """Logs and traces of every process of a cluster."""

    log_format: Annotated[LogFormat, Scope.CLUSTER, Field(description="Lines of the logs.")] = "text"
    otlp_endpoint: Annotated[
        str | None,
        Scope.CLUSTER,
        Field(
            pattern=r"^https?://[^/\s]+", description="Collector of OpenTelemetry that gets traces: http://HOST:4318."
        ),
    ] = None
    otlp_protocol: Annotated[
        Literal["http/protobuf", "grpc"] | None,
        Scope.CLUSTER,
        Field(description="How traces are sent.  [default: http/protobuf]"),
    ] = None
    trace_ratio: Annotated[
        float | None,
        Scope.CLUSTER,
        Field(ge=0, le=1, description="Of the calls whose callers do not say, those that are traced.  [default: 1]"),
    ] = None

    def trace_settings(self, environ: Mapping[str, str]) -> TraceSettings | None:
        """Settings of traces, with what OpenTelemetry's variables say where these say nothing. None: there are no
        traces. Raises ConfigError."""
        return trace_settings(self.otlp_endpoint, self.otlp_protocol, self.trace_ratio, environ)
