"""`diptych plan`: what a cluster would take, before anything starts; with --gpus, the best layout for a load."""

from pathlib import Path
from typing import Any

import psutil
import typer

from ...workers.common.errors import ConfigError
from ...workers.common.settings import parse_bytes
from ...workers.config.worker_config import KV_FRACTIONS
from ...workers.kv.dtypes import DTYPE_BYTES, KV_DTYPES
from ...workers.models.plan.draft_fit import check_draft_divides
from ...workers.models.plan.formats import QUANTIZE
from ...workers.models.plan.number_layouts import planned_layouts
from ..preflight.checks import check_draft, check_head, check_model, resolve_model
from ..preflight.memory_plan import Memory, Parallelism, PlannedDraft
from . import load_flags as flag
from . import plan_flags as of_plan
from .load_flags import LoadFormat
from .memory_view import show_memory

_OF_BOTH = {
    "model", "memory", "quantize", "kv_dtype", "block_size", "max_context_tokens", "kv_memory_fraction", "gpus",
}  # fmt: skip
# Flags of the memory plan alone: the reason for which --gpus refuses each.
_OF_MEMORY = {
    "dtype": "is bfloat16 with --gpus, in which the simulator's GPUs compute",
    "tensor_parallel": "is searched with --gpus",
    "expert_parallel": "follows from the model with --gpus",
    "data_parallel": "does not work with --gpus: there it is not supported yet",
    "device": "is cuda with --gpus",
    "rank_memory": "is that of the GPU with --gpus",
    "speculation": "does not work with --gpus: the search knows no acceptance; see `diptych simulate --acceptance`",
    "draft_model": "does not work with --gpus: the search knows no acceptance; see `diptych simulate --acceptance`",
    "draft_tensor_parallel": "does not work with --gpus, as --draft-model",
    "kv_memory": "does not work with --gpus: use --kv-memory-fraction",
}


def plan(  # noqa: PLR0913, PLR0917  typer makes a flag of each parameter
    context: typer.Context,
    model: of_plan.Model,
    memory: of_plan.ForMemory = True,
    dtype: of_plan.Dtype = "bfloat16",
    quantize: of_plan.Quantize = None,
    kv_dtype: of_plan.KVDtype = "auto",
    tensor_parallel: of_plan.TensorParallel = 1,
    expert_parallel: of_plan.ExpertParallel = 1,
    data_parallel: of_plan.DataParallel = 1,
    speculation: of_plan.Speculation = None,
    draft_model: of_plan.DraftModel = None,
    draft_tensor_parallel: of_plan.DraftTensorParallel = None,
    block_size: of_plan.BlockSize = 16,
    max_context_tokens: of_plan.MaxContextTokens = None,
    device: of_plan.Device = "cpu",
    rank_memory: of_plan.RankMemory = None,
    kv_memory: of_plan.KVMemory = None,
    kv_memory_fraction: of_plan.KVMemoryFraction = None,
    gpus: of_plan.Gpus = None,
    ttft: of_plan.Ttft = None,
    tpot: of_plan.Tpot = None,
    share: of_plan.LevelShare = 90.0,
    rate: of_plan.Rate = None,
    trace: flag.TraceFile = None,
    trace_format: flag.TraceFormat = LoadFormat.AZURE,
    num_requests: flag.NumRequests = 2000,
    length_scale: flag.LengthScale = 1.0,
    max_input_tokens: flag.MaxInputTokens = 0,
    max_output_tokens: flag.MaxOutputTokens = 0,
    input_tokens: flag.InputTokens = "1024",
    output_tokens: flag.OutputTokens = "128",
    turns: flag.Turns = 1,
    think_time: flag.ThinkTime = 0.0,
    link_gbit: flag.LinkGbit = None,
    link_latency_ms: flag.LinkLatencyMs = None,
    request_ms: flag.RequestMs = None,
    compute_efficiency: flag.ComputeEfficiency = 0.6,
    memory_efficiency: flag.MemoryEfficiency = 0.75,
    step_overhead_ms: flag.StepOverheadMs = 1.0,
    price: flag.Price = None,
    seed: flag.Seed = 0,
    output: of_plan.Output = None,
    plot: of_plan.Plot = None,
    jobs: of_plan.Jobs = None,
) -> None:
    """Say what MODEL takes on each rank, and how many tokens and sequences fit. With --gpus: search the layouts of a
    cluster for the one that serves most within a service level. Reads config.json, or a GGUF file's header, alone."""
    flags = {name: value for name, value in locals().items() if name != "context"}
    _check_given(context, on_gpus=gpus is not None)
    _check_numbers(quantize, kv_dtype)
    if gpus is None:
        _plan_memory(flags)
        return
    from .plan_cluster import plan_cluster

    plan_cluster(flags | {"kv_memory_fraction": kv_memory_fraction or KV_FRACTIONS["cuda"]})


def _check_given(context: typer.Context, *, on_gpus: bool) -> None:
    """Raise ConfigError for a flag that was given and would not be used."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in _OF_BOTH:
            continue
        flag_name = f"--{name.replace('_', '-')}"
        if on_gpus and name in _OF_MEMORY:
            raise ConfigError(f"{flag_name} {_OF_MEMORY[name]}: leave it out")
        if not on_gpus and name not in _OF_MEMORY:
            raise ConfigError(f"{flag_name} needs --gpus, as in --gpus H100:8")


def _check_numbers(quantize: str | None, kv_dtype: str) -> None:
    """Raise ConfigError for what weights or KV cannot be."""
    if quantize is not None and quantize not in QUANTIZE:
        raise ConfigError(f"--quantize must be {' or '.join(QUANTIZE)}, got {quantize!r}")
    if kv_dtype not in ("auto", *KV_DTYPES):
        raise ConfigError(f"--kv-dtype must be auto, {', '.join(KV_DTYPES)}, got {kv_dtype!r}")


def _plan_memory(flags: dict[str, Any]) -> None:
    dtype, quantize, device = flags["dtype"], flags["quantize"], flags["device"]
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype must be {' or '.join(DTYPE_BYTES)}, got {dtype!r}")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {device!r}")
    if device == "cuda" and flags["rank_memory"] is None:
        raise ConfigError(
            "--device cuda needs --rank-memory: the free memory of each GPU (see nvidia-smi), for example 79GiB"
        )
    folder = Path(resolve_model(flags["model"]))
    spec = check_model(folder)
    tensor_parallel, data_parallel = flags["tensor_parallel"], flags["data_parallel"]
    sizes = tensor_parallel, flags["block_size"], flags["expert_parallel"], data_parallel
    num_draft_ranks = flags["draft_tensor_parallel"]
    how = Parallelism(dtype, quantize, *sizes, device == "cuda", num_draft_ranks, flags["kv_dtype"])
    rank_bytes = _bytes(flags["rank_memory"], "--rank-memory")
    rank_bytes = rank_bytes or psutil.virtual_memory().available // (tensor_parallel * data_parallel)
    fraction = KV_FRACTIONS[device] if flags["kv_memory_fraction"] is None else flags["kv_memory_fraction"]
    has = Memory(rank_bytes, fraction, _bytes(flags["kv_memory"], "--kv-memory"))
    show_memory(folder, spec, how, has, flags["max_context_tokens"], _draft(flags, folder, how))


def _draft(flags: dict[str, Any], folder: Path, how: Parallelism) -> PlannedDraft | None:
    """Return what drafts for the model in `folder`. Raises ConfigError or CheckpointError where it does not fit."""
    method, longest = flags["speculation"], flags["max_context_tokens"]
    given = Path(resolve_model(flags["draft_model"])) if flags["draft_model"] is not None else None
    match method:
        case None if given is None:
            return None
        case None | "draft" if given is not None:
            of_draft = check_draft(given, folder, longest)
            made = PlannedDraft(of_draft, layouts=planned_layouts(given, of_draft))
            check_draft_divides(given, made.spec, how.quantize, made.num_ranks(how))
            return made
        case "mtp" | "eagle3" if given is not None or method == "mtp":
            return PlannedDraft(check_head(given or folder, folder, longest, method).decoder, given or folder)
        case "draft" | "eagle3":
            raise ConfigError(f"--speculation {method} needs --draft-model: the folder of what drafts")
        case _:
            raise ConfigError(f"--speculation must be draft, eagle3 or mtp, whose weights and KV count, got {method!r}")


def _bytes(text: str | None, flag: str) -> int | None:
    """Raises ConfigError."""
    if text is None:
        return None
    try:
        found = parse_bytes(text)
    except ValueError as e:
        raise ConfigError(f"{flag}: {e}") from e
    if not isinstance(found, int) or found < 1:
        raise ConfigError(f"{flag} must be a size above 0, for example 2GiB, got {text!r}")
    return found
