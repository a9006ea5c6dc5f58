"""`diptych plan`: what a cluster would take, before anything starts."""

from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...workers.common.errors import ConfigError, InsufficientMemory
from ...workers.common.settings import parse_bytes
from ...workers.kv.layout import DTYPE_BYTES
from ...workers.models.families.spec import ModelSpec
from ...workers.models.plan.formats import QUANTIZE
from ..common.plurals import count
from ..preflight.checks import check_model, resolve_model
from ..preflight.memory_plan import Memory, MemoryPlan, Parallelism, kv_formula, plan_memory

LENGTHS = (1024, 8192)  # tokens of the counted sequences, in addition to the longest


def plan(  # noqa: PLR0913, PLR0917  typer makes a flag of each parameter
    model: Annotated[str, typer.Argument(help="Folder with a Hugging Face config.json, or `tiny`.")],
    memory: Annotated[
        bool, typer.Option("--memory", help="Weights and KV of each rank, and what fits: all that is planned so far.")
    ] = True,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    quantize: Annotated[str | None, typer.Option(help="Weights at load: int8 or int4.")] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks of a worker.")] = 1,
    expert_parallel: Annotated[int, typer.Option(min=1, help="As many: ranks have whole experts.")] = 1,
    data_parallel: Annotated[int, typer.Option(min=1, help="Workers that share a mixture's experts.")] = 1,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a KV block.")] = 16,
    max_context_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest sequence.  [default: the model's]")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda: a GPU for each rank.")] = "cpu",
    rank_memory: Annotated[
        str | None, typer.Option(help="What each rank may use, as 80GiB.  [default: on cpu this machine's share]")
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="KV cache of a worker, as 2GiB.  [default: by fraction]")
    ] = None,
    kv_memory_fraction: Annotated[
        float, typer.Option(min=0.0, max=0.95, help="Of what is free once the weights are there.")
    ] = 0.3,
) -> None:
    """Say what MODEL takes on each rank, and how many tokens and sequences fit. Reads config.json alone."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype must be {' or '.join(DTYPE_BYTES)}, got {dtype!r}")
    if quantize is not None and quantize not in QUANTIZE:
        raise ConfigError(f"--quantize must be {' or '.join(QUANTIZE)}, got {quantize!r}")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {device!r}")
    if device == "cuda" and rank_memory is None:
        raise ConfigError(
            "--device cuda needs --rank-memory: the free memory of each GPU (see nvidia-smi), for example 79GiB"
        )
    folder = Path(resolve_model(model))
    spec = check_model(folder)
    sizes = tensor_parallel, block_size, expert_parallel, data_parallel
    how = Parallelism(dtype, quantize, *sizes, on_gpus=device == "cuda")
    here = psutil.virtual_memory().available // (tensor_parallel * data_parallel)
    has = Memory(_bytes(rank_memory, "--rank-memory") or here, kv_memory_fraction, _bytes(kv_memory, "--kv-memory"))
    found = plan_memory(spec, how, has, max_context_tokens)
    console = Console(highlight=False, width=None if Console().is_terminal else 160)
    console.print(f"{folder.name}: {spec.architecture}, {count(spec.num_layers, 'layer')}, {_how(how)}", soft_wrap=True)
    console.print(_weights(found))
    product, source = kv_formula(spec, how)
    console.print(f"KV of a token, on a rank: {found.token_bytes:,} bytes = {product}", soft_wrap=True)
    console.print(Text(f"  from {source}", style="dim"), soft_wrap=True)
    _show_fit(console, spec, how, has, found)


def _how(how: Parallelism) -> str:
    ranks = f"{how.tensor_parallel} ranks" if how.tensor_parallel > 1 else "one rank"
    if how.on_gpus:
        ranks += ", each on a GPU" if how.tensor_parallel > 1 else ", on a GPU"
    if how.data_parallel > 1:
        ranks = f"{how.data_parallel} workers of one rank, which share experts"
    return (
        f"{how.dtype}{f', weights {how.quantize}' if how.quantize else ''}, {ranks}, blocks of "
        f"{count(how.block_size, 'token')}"
    )


def _weights(plan: MemoryPlan) -> Table:
    table = Table(box=None, pad_edge=False)
    ranks = {"rank 0": plan.first} | ({"each other": plan.other} if plan.other is not None else {})
    table.add_column("bytes of weights")
    for name in ranks:
        table.add_column(name, justify="right")
    for part in plan.first.weights:
        table.add_row(f"  {part}", *(f"{rank.weights.get(part, 0):,}" for rank in ranks.values()))
    table.add_row("  together", *(f"{rank.weight_bytes:,}" for rank in ranks.values()), style="bold")
    return table


def _show_fit(console: Console, spec: ModelSpec, how: Parallelism, has: Memory, plan: MemoryPlan) -> None:
    """Raises InsufficientMemory where the weights, or one full context, do not fit."""
    ranks = [rank for rank in (plan.first, plan.other) if rank is not None]
    tightest = min(ranks, key=lambda rank: rank.free_bytes)
    if tightest.free_bytes < 0:
        packed = "" if how.on_gpus else "--quantize, "  # there weights stay at full size
        raise InsufficientMemory(
            f"the weights of a rank take {tightest.weight_bytes:,} bytes, but it has {has.rank_bytes:,}: use more "
            f"ranks (--tensor-parallel), {packed}or more memory"
        )
    longest = plan.max_context_tokens
    console.print(
        f"memory of a rank: {has.rank_bytes:,} bytes; {tightest.free_bytes:,} free beside the weights, "
        f"{tightest.kv_bytes:,} of them for KV",
        soft_wrap=True,
    )
    if max(rank.kv_bytes - rank.free_bytes for rank in ranks) > 0:
        raise InsufficientMemory(
            f"--kv-memory needs {tightest.kv_bytes:,} bytes on a rank, but {tightest.free_bytes:,} are free: lower it"
        )
    if plan.num_tokens < longest:
        raise InsufficientMemory(
            f"{plan.num_tokens:,} tokens fit, less than one context of {longest:,}: raise --kv-memory or "
            f"--kv-memory-fraction, or lower --max-context-tokens"
        )
    on_each = ", on each worker" if how.data_parallel > 1 else ""
    console.print(f"fits: {count(plan.num_tokens, 'token')} of KV{on_each}", style="bold", soft_wrap=True)
    for length in sorted({min(n, longest) for n in LENGTHS} | {longest}):
        num = min(rank.num_sequences(length, how.block_size) for rank in ranks)
        console.print(f"  {count(num, 'sequence')} of {count(length, 'token')}", soft_wrap=True)
    if how.quantize:
        note = "where the compiled kernels are not built torch computes, and holds weights at full size"
        if plan.full_size_because is not None:
            note = f"weights are held at full size, as {plan.full_size_because}"
        console.print(Text(f"  {note}", style="dim"), soft_wrap=True)
    if how.on_gpus:
        note = "CUDA, its libraries and graphs take some of a GPU too, before what is free is shared out"
        console.print(Text(f"  {note}", style="dim"), soft_wrap=True)
    if spec.tie_word_embeddings:
        console.print(Text("  the head is tied to the embeddings", style="dim"))


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
