"""Choice of one token for each row of logits: greedy, or temperature, min-p, top-k, top-p and Gumbel-max.

Twice: with torch, on any device, and by the compiled kernel where it was built. The noise is a function of (seed,
position, token id) alone (see noise.py), so a draw does not depend on the batch it is made in. The two differ where
the rounding of a sum of probabilities decides, about once in a million draws: no more than the logits of two kinds of
worker differ anyway.
"""

import math
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from ...kernels.cpu.sample import Draw, RowSampler
from ...kernels.sampling.gumbel import gumbel
from ..common.request import SamplingParams
from ..core.sequence import SampledRow
from .noise import stream_key

# top-p alone looks at this many candidates first and sorts the vocabulary only where they do not hold enough mass.
_TOP_P_CANDIDATES = 1024
MIN_TEMPERATURE = 1e-6  # below it float32 gives the same result as greedy
_MAX_NOISE_ELEMENTS = 1 << 20  # drawn at a time


def choose_compiled(sampler: RowSampler, logits: Tensor, sequences: SequenceOf[SampledRow]) -> list[int]:
    """Choose as `choose` does, without changing the logits."""
    return sampler.sample(logits, [draw_of(sequence, sequence.num_tokens) for sequence in sequences])


def draw_of(sequence: SampledRow, position: int) -> Draw:
    """Return the draw of the sequence's token at `position`."""
    sampling = sequence.request.sampling
    if sampling.is_greedy:
        return Draw()
    return Draw(
        max(sampling.temperature, MIN_TEMPERATURE),
        log_of(sampling.min_p),
        sampling.top_p,
        sampling.top_k,
        stream_key(sampling.seed, position),
    )


def choose(logits: Tensor, sequences: SequenceOf[SampledRow]) -> Tensor:
    """logits: [R, vocab] float32, changed in place. The token of each row, [R] int64: the argmax (lowest id among
    equals) where greedy, otherwise a draw."""
    drawn = [row for row, sequence in enumerate(sequences) if not sequence.request.sampling.is_greedy]
    if not drawn:
        return logits.argmax(dim=-1)
    if len(drawn) == len(sequences):
        return _draw(logits, sequences)
    tokens = logits.argmax(dim=-1)
    rows = _indices(drawn, logits)
    tokens[rows] = _draw(logits[rows], [sequences[row] for row in drawn])
    return tokens


def _draw(logits: Tensor, sequences: SequenceOf[SampledRow]) -> Tensor:
    """Draw one token for each row by Gumbel-max, [r] int64. Changes `logits`."""
    temperatures = [max(s.request.sampling.temperature, MIN_TEMPERATURE) for s in sequences]
    logits -= logits.amax(dim=-1, keepdim=True)
    if any(t != 1.0 for t in temperatures):
        logits /= _column(temperatures, logits)
    filtered = [row for row, s in enumerate(sequences) if _is_filtered(s)]
    if filtered:
        rows = _indices(filtered, logits)
        thresholds = torch.full_like(logits[:, :1], -torch.inf)
        thresholds[rows] = _thresholds(logits[rows], [sequences[row].request.sampling for row in filtered])
        logits.masked_fill_(logits < thresholds, -torch.inf)
    keys = [stream_key(s.request.sampling.seed, s.num_tokens) for s in sequences]
    vocab_size = logits.shape[1]
    step = max(1, _MAX_NOISE_ELEMENTS // vocab_size)
    for start in range(0, len(keys), step):
        logits[start : start + step] += gumbel(keys[start : start + step], vocab_size, logits.device)
    return logits.argmax(dim=-1)


def _is_filtered(sequence: SampledRow) -> bool:
    sampling = sequence.request.sampling
    return sampling.min_p > 0.0 or sampling.top_k > 0 or sampling.top_p < 1.0


def _thresholds(logits: Tensor, samplings: SequenceOf[SamplingParams]) -> Tensor:
    """The smallest logit that each row's min-p, top-k and top-p keep, [r, 1]. logits: [r, vocab], 0 at their largest.

    Each filter sees what the one before it left. Tokens that tie with the last one kept are kept too.
    """
    threshold = _column([log_of(s.min_p) for s in samplings], logits)
    limited = [row for row, s in enumerate(samplings) if 0 < s.top_k < logits.shape[1]]
    if limited:
        rows = _indices(limited, logits)
        kth = _kth_largest(logits[rows], [samplings[row].top_k for row in limited])
        threshold[rows] = threshold[rows].maximum(kth)
    nucleus = [row for row, s in enumerate(samplings) if s.top_p < 1.0]
    if nucleus:
        rows = _indices(nucleus, logits)
        kept = logits[rows]
        kept.masked_fill_(kept < threshold[rows], -torch.inf)
        threshold[rows] = threshold[rows].maximum(_nucleus_end(kept, [samplings[row].top_p for row in nucleus]))
    return threshold


def _kth_largest(logits: Tensor, top_k: SequenceOf[int]) -> Tensor:
    """The top_k[i]-th largest value of row i, [r, 1]."""
    values = logits.topk(max(top_k), dim=-1).values
    return values.gather(1, _indices(top_k, logits)[:, None] - 1)


def _nucleus_end(logits: Tensor, top_p: SequenceOf[float]) -> Tensor:
    """The last logit of the smallest set of likeliest tokens that holds top_p[i] of row i's mass, [r, 1].

    Holtzman et al. 2020, section 3.1.
    """
    vocab_size = logits.shape[1]
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    wanted = _column(top_p, logits)
    values = logits.topk(min(vocab_size, _TOP_P_CANDIDATES), dim=-1).values
    mass = (values - log_total).exp_().cumsum_(dim=-1)
    if values.shape[1] < vocab_size and bool((mass[:, -1:] < wanted).any()):
        values = logits.sort(dim=-1, descending=True).values
        mass = (values - log_total).exp_().cumsum_(dim=-1)
    # A token is in while the mass before it falls short.
    num_kept = 1 + (mass[:, :-1] < wanted).sum(dim=-1, keepdim=True)
    return values.gather(1, num_kept - 1)


def log_of(x: float) -> float:
    """A min_p as the least logit, from the largest, that it keeps."""
    return math.log(x) if x > 0.0 else -math.inf


def _indices(values: SequenceOf[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def _column(values: SequenceOf[float], like: Tensor) -> Tensor:
    """[r, 1] float32."""
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
