"""The choice of tokens: 128 rows of 128 k logits. Bytes: the logits once (and what else is read or written, once)."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from diptych.kernels.sampling.logits_processors import (
    IN_PROMPT,
    LogitsProcessors,
    process_logits_triton,
    process_logits_twin,
)
from diptych.kernels.sampling.logsumexp import logsumexp_top_k_triton, logsumexp_top_k_twin
from diptych.kernels.sampling.sampling import Draws, sample_triton, sample_twin

from .common import DEVICE, Case, Goal, Random, compiled, sized

ROWS, VOCABULARY = sized((128, 131072), (3, 1000))
TOP_K, TOP_P, TEMPERATURE = 50, 0.9, 0.8
NUM_TOP, NUM_BIASES = 20, 64


def make_draws(seed: int, temperature: float, top_k: int, top_p: float, dtype: torch.dtype) -> tuple[Tensor, Draws]:
    """Logits of a standard deviation of 3, of which a nucleus of 0.9 has some thousands of tokens."""
    random = Random(seed)
    logits = (random.normal(ROWS, VOCABULARY, dtype=torch.float32) * 3).to(dtype)
    floats = [torch.full((ROWS,), value, device=DEVICE) for value in (temperature, -math.inf, top_p)]
    ks = torch.full((ROWS,), top_k, dtype=torch.int32, device=DEVICE)
    return logits, Draws(*floats, ks, random.whole(0, 1 << 62, ROWS))


def sorted_and_drawn(x: tuple[Tensor, Draws]) -> Tensor:
    """Sample as servers do it with torch: sort, limit, softmax, draw by exponential noise, put back."""
    logits, draws = x
    scaled = logits.float() / draws.temperature[:, None]
    values, ids = scaled.sort(dim=-1)
    cut = values.gather(1, VOCABULARY - draws.top_k.long()[:, None])
    values = values.masked_fill(values < cut, -torch.inf)
    mass = values.softmax(dim=-1).cumsum(dim=-1)
    probabilities = values.masked_fill(mass <= 1 - draws.top_p[:, None], -torch.inf).softmax(dim=-1)
    best = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)
    return ids.gather(1, best[:, None])[:, 0]


def sample_case(
    name: str, temperature: float, top_k: int, top_p: float, dtype: torch.dtype, goals: tuple[Goal, ...] = ()
) -> Case:
    is_limited = bool(top_k) or top_p < 1.0
    limited = {"sort alone": lambda x: x[0].sort(dim=-1), "sort, limit and draw": sorted_and_drawn}
    return Case(
        f"sampling: {name}",
        f"{ROWS} x {VOCABULARY}, {str(dtype).removeprefix('torch.')}",
        lambda seed: make_draws(seed, temperature, top_k, top_p, dtype),
        lambda x: sample_triton(*x),
        lambda x, _: sample_twin(*x),
        ROWS * VOCABULARY * dtype.itemsize,
        # A sum of probabilities that ends at another place by rounding processors whether its last token may be drawn.
        tolerance=0.02,
        peers=limited if is_limited and top_k else {"argmax": lambda x: x[0].argmax(dim=-1)},
        unlike=(*limited, "argmax") if temperature else (),
        goals=goals,
    )


def make_changes(seed: int) -> tuple[Tensor, LogitsProcessors]:
    """Half of the vocabulary allowed, a tenth of it in the prompt, a twentieth in the output; NUM_BIASES a row."""
    random = Random(seed)
    logits = random.normal(ROWS, VOCABULARY, dtype=torch.float32)
    chance = random.uniform(ROWS, VOCABULARY)
    counts = (chance < 0.1).int() * IN_PROMPT + (chance > 0.95).int() * 2
    masks = random.whole(-(1 << 31), (1 << 31) - 1, ROWS, -(-VOCABULARY // 32), dtype=torch.int32)
    each = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    return logits, LogitsProcessors(
        torch.arange(ROWS + 1, dtype=torch.int32, device=DEVICE) * NUM_BIASES,
        torch.cat([random.order(VOCABULARY)[:NUM_BIASES] for _ in range(ROWS)]).int(),
        random.normal(ROWS * NUM_BIASES, dtype=torch.float32),
        each,
        masks,
        each.clone(),
        counts,
        torch.full((ROWS,), 1.1, device=DEVICE),
        torch.full((ROWS,), 0.5, dtype=torch.float64, device=DEVICE),
        torch.full((ROWS,), 0.25, dtype=torch.float64, device=DEVICE),
    )


def change(x: tuple[Tensor, LogitsProcessors]) -> Tensor:
    process_logits_triton(*x)
    return x[0]


def changed_by_twin(x: tuple[Tensor, LogitsProcessors], _: object) -> Tensor:
    process_logits_twin(*x)
    return x[0]


def change_by_torch(logits: Tensor, processors: LogitsProcessors) -> None:
    """All rows at once, each with its own mask and counts."""
    logits.scatter_add_(1, processors.bias_ids.view(-1, NUM_BIASES).long(), processors.biases.view(-1, NUM_BIASES))
    token = torch.arange(VOCABULARY, device=logits.device)
    allowed = (processors.masks[:, token // 32] >> (token % 32)) & 1 != 0
    penalty = processors.repetition[:, None]
    values = torch.where(allowed, logits, -torch.inf)
    repeated = torch.where(values > 0, values / penalty, values * penalty)
    values = torch.where(processors.counts == 0, values, repeated)
    num_output = processors.counts & (IN_PROMPT - 1)
    amounts = processors.presence.float()[:, None] + processors.frequency.float()[:, None] * num_output
    logits.copy_(values - torch.where(num_output > 0, amounts, 0.0))


def penalty_case() -> Case:
    by_torch = compiled(change_by_torch)

    def peer(x: tuple[Tensor, LogitsProcessors]) -> Tensor:
        by_torch(*x)
        return x[0]

    # Read and written: the logits; read: the counts, and a bit of the mask for each.
    return Case(
        "penalties, masks, biases",
        f"{ROWS} x {VOCABULARY}",
        make_changes,
        change,
        changed_by_twin,
        ROWS * VOCABULARY * (4 + 4 + 4 + 1 / 8),
        tolerance=1e-5,
        peers={"torch.compile": peer},
    )


def totals_by_torch(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, ids = x.float().topk(NUM_TOP, dim=-1)
    return x.float().logsumexp(dim=-1), ids, values


def totals_case() -> Case:
    return Case(
        f"log totals, top {NUM_TOP}",
        f"{ROWS} x {VOCABULARY}",
        lambda seed: Random(seed).normal(ROWS, VOCABULARY, dtype=torch.float32) * 3,
        lambda x: logsumexp_top_k_triton(x, NUM_TOP),
        lambda x, _: logsumexp_top_k_twin(x, NUM_TOP),
        ROWS * VOCABULARY * 4,
        tolerance=1e-3,  # of places: equal logits may be told in another order
        peers={"logsumexp + topk": totals_by_torch, "torch.compile": compiled(totals_by_torch)},
    )


def cases() -> Iterator[Case]:
    sorting = (Goal("sort", 4.0, 10.0),)
    yield sample_case("top-k and top-p", TEMPERATURE, TOP_K, TOP_P, torch.float32, sorting)
    yield sample_case("top-k and top-p", TEMPERATURE, TOP_K, TOP_P, torch.bfloat16, sorting)
    yield sample_case("top-p", TEMPERATURE, 0, TOP_P, torch.float32)
    yield sample_case("no limits", TEMPERATURE, 0, 1.0, torch.float32)
    yield sample_case("greedy", 0.0, 0, 1.0, torch.float32)
    yield penalty_case()
    yield totals_case()
