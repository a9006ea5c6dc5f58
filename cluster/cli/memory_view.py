"""Shows a memory plan: what a model takes on each rank, and what fits."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...workers.common.errors import InsufficientMemory
from ...workers.models.families.spec import ModelSpec
from ...workers.models.plan.number_layouts import planned_layouts
from ..common.plurals import count
from ..preflight.memory_plan import Memory, MemoryPlan, Parallelism, PlannedDraft, kv_formula, plan_memory

LENGTHS = (1024, 8192)  # tokens of the counted sequences, in addition to the longest


def show_memory(
    folder: Path,
    spec: ModelSpec,
    how: Parallelism,
    has: Memory,
    max_context_tokens: int | None,
    draft: PlannedDraft | None = None,
) -> None:
    """Print it. Raises ConfigError, and InsufficientMemory where the weights, or one full context, do not fit."""
    layouts = planned_layouts(folder, spec)
    found = plan_memory(spec, how, has, max_context_tokens, draft, layouts)
    console = Console(highlight=False, markup=False, width=None if Console().is_terminal else 160)
    console.print(f"{folder.name}: {spec.architecture}, {count(spec.num_layers, 'layer')}, {_how(how)}", soft_wrap=True)
    console.print(_weights(found))
    product, source = kv_formula(spec, how)
    if draft is not None:
        of_draft = replace(how, tensor_parallel=draft.num_ranks(how))
        product += f" + {kv_formula(draft.spec, of_draft)[0]} of the {draft.name}"
    console.print(f"KV of a token, on a rank: {found.token_bytes:,} bytes = {product}", soft_wrap=True)
    console.print(Text(f"  from {source}", style="dim"), soft_wrap=True)
    _show_fit(console, spec, how, has, found)
    if layouts and found.full_size_because is None:
        note = "weights of the checkpoint stay in its own bits"
        console.print(Text(f"  {note}", style="dim"), soft_wrap=True)


def _how(how: Parallelism) -> str:
    ranks = f"{how.tensor_parallel} ranks" if how.tensor_parallel > 1 else "one rank"
    if how.on_gpus:
        ranks += ", each on a GPU" if how.tensor_parallel > 1 else ", on a GPU"
    if how.data_parallel > 1:
        ranks = (
            f"{how.data_parallel} workers of one rank{', each on a GPU' if how.on_gpus else ''}, which share experts"
        )
    return (
        f"{how.dtype}{f', weights {how.quantize}' if how.quantize else ''}"
        f"{'' if how.kv_dtype == 'auto' else f', KV {how.kv_dtype}'}, {ranks}, blocks of "
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
        raise InsufficientMemory(
            f"the weights of a rank take {tightest.weight_bytes:,} bytes, but it has {has.rank_bytes:,}: use more "
            "ranks (--tensor-parallel), --quantize, or more memory"
        )
    longest = plan.max_context_tokens
    tail = f" and {plan.tail_bytes:,} of the KV tail" if plan.tail_bytes else ""
    console.print(
        f"memory of a rank: {has.rank_bytes:,} bytes; {tightest.free_bytes:,} free beside the weights{tail}, "
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
    if (how.quantize and not how.on_gpus) or plan.full_size_because is not None:
        note = "where the compiled kernels are not built torch computes, and holds weights at full size"
        if plan.full_size_because is not None:
            note = f"weights are held at full size, as {plan.full_size_because}"
        console.print(Text(f"  {note}", style="dim"), soft_wrap=True)
    if how.on_gpus:
        note = "CUDA, its libraries and graphs take some of a GPU too, before what is free is shared out"
        console.print(Text(f"  {note}", style="dim"), soft_wrap=True)
    if spec.tie_word_embeddings:
        tied = "the head is tied to the embeddings" + (", and a copy of them in int8" if how.quantize else "")
        console.print(Text(f"  {tied}", style="dim"))
