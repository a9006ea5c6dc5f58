"""Logits to tokens, all rows of a step at once; a row pays only for what its request asks.

The order of operations is vLLM's: log-probabilities of the raw logits; bans (min_tokens) and logit bias; penalties;
then, for rows that are not greedy, temperature, min-p, top-k, top-p and Gumbel-max. The noise is a function of (seed,
position, token id) alone (see noise.py), so a draw does not depend on the batch it is made in.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .noise import gumbel, stream_key
from .request import SamplingParams
from .sequence import SampledToken, Sequence

# top-p alone looks at this many candidates first and sorts the vocabulary only where they do not hold enough mass.
_TOP_P_CANDIDATES = 1024
_MIN_TEMPERATURE = 1e-6  # below it float32 cannot tell the result from greedy
_MAX_NOISE_ELEMENTS = 1 << 20  # drawn at a time


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Raw log-probabilities of the rows that asked for them."""

    row_of: dict[int, int]  # row of the logits -> row below
    raw: Tensor  # [r, vocab] float32
    top_ids: Tensor  # [r, k] int64
    top_values: Tensor  # [r, k] float32


class Sampler:
    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: Tensor, sequences: SequenceOf[Sequence]) -> list[SampledToken]:
        """logits: [R, vocab] float32, one row a sequence, changed in place. Returns one token a row."""
        logprobs = _raw_logprobs(logits, sequences)
        self._ban_and_bias(logits, sequences)
        _penalise(logits, sequences)
        tokens = _choose(logits, sequences)
        ids: list[int] = tokens.tolist()
        if logprobs is None:
            return [SampledToken(sequence, token) for sequence, token in zip(sequences, ids, strict=True)]
        return _with_logprobs(sequences, ids, logprobs)

    def _ban_and_bias(self, logits: Tensor, sequences: SequenceOf[Sequence]) -> None:
        """-inf for end-of-sequence and stop ids before min_tokens, and the logit bias."""
        banned: list[tuple[int, int]] = []
        biased: list[tuple[int, int, float]] = []
        for row, sequence in enumerate(sequences):
            sampling = sequence.request.sampling
            if sequence.num_output < sampling.min_tokens:
                banned += [(row, token) for token in (*self._eos_token_ids, *sampling.stop_token_ids)]
            if sampling.logit_bias:
                biased += [(row, token, bias) for token, bias in sampling.logit_bias.items()]
        if biased:
            rows, ids, biases = zip(*biased, strict=True)
            index = (_indices(rows, logits), _indices(ids, logits))
            logits[index] += torch.tensor(biases, dtype=torch.float32, device=logits.device)
        if banned:
            rows, ids = zip(*banned, strict=True)
            logits[_indices(rows, logits), _indices(ids, logits)] = -torch.inf


def _penalise(logits: Tensor, sequences: SequenceOf[Sequence]) -> None:
    """Repetition penalty over prompt and output; presence and frequency penalties over output."""
    for row, sequence in enumerate(sequences):
        sampling = sequence.request.sampling
        if sampling.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.unique(sequence.token_ids)).to(logits.device)
            values, penalty = logits[row, seen], sampling.repetition_penalty
            logits[row, seen] = torch.where(values > 0, values / penalty, values * penalty)
        if sequence.num_output and (sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0):
            ids, counts = np.unique(sequence.output_token_ids, return_counts=True)
            amounts = sampling.presence_penalty + sampling.frequency_penalty * counts
            logits[row, torch.from_numpy(ids).to(logits.device)] -= torch.from_numpy(amounts).to(logits)


def _choose(logits: Tensor, sequences: SequenceOf[Sequence]) -> Tensor:
    """The token of each row, [R] int64: the argmax (lowest id among equals) where greedy, otherwise a draw."""
    drawn = [row for row, sequence in enumerate(sequences) if not sequence.request.sampling.is_greedy]
    if not drawn:
        return logits.argmax(dim=-1)
    if len(drawn) == len(sequences):
        return _draw(logits, sequences)
    tokens = logits.argmax(dim=-1)
    rows = _indices(drawn, logits)
    tokens[rows] = _draw(logits[rows], [sequences[row] for row in drawn])
    return tokens


def _draw(logits: Tensor, sequences: SequenceOf[Sequence]) -> Tensor:
    """One draw a row by Gumbel-max, [r] int64. Changes `logits`."""
    temperatures = [max(s.request.sampling.temperature, _MIN_TEMPERATURE) for s in sequences]
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


def _is_filtered(sequence: Sequence) -> bool:
    sampling = sequence.request.sampling
    return sampling.min_p > 0.0 or sampling.top_k > 0 or sampling.top_p < 1.0


def _thresholds(logits: Tensor, samplings: SequenceOf[SamplingParams]) -> Tensor:
    """The smallest logit that each row's min-p, top-k and top-p keep, [r, 1]. logits: [r, vocab], 0 at their largest.

    Each filter sees what the one before it left. Tokens that tie with the last one kept are kept too.
    """
    threshold = _column([s.min_p for s in samplings], logits).log_()  # -inf where it is off
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


def _raw_logprobs(logits: Tensor, sequences: SequenceOf[Sequence]) -> _Logprobs | None:
    """Log-softmax of the rows that ask for it, before anything changes them."""
    asking = [row for row, s in enumerate(sequences) if s.request.sampling.logprobs is not None]
    if not asking:
        return None
    raw = logits[_indices(asking, logits)].log_softmax(dim=-1)
    num_top = max(sequences[row].request.sampling.logprobs or 0 for row in asking)
    top = raw.topk(min(num_top, raw.shape[1]), dim=-1)
    return _Logprobs({row: i for i, row in enumerate(asking)}, raw, top.indices, top.values)


def _with_logprobs(sequences: SequenceOf[Sequence], ids: list[int], logprobs: _Logprobs) -> list[SampledToken]:
    chosen = _indices([ids[row] for row in logprobs.row_of], logprobs.raw)
    own: list[float] = logprobs.raw.gather(1, chosen[:, None])[:, 0].tolist()
    top_ids, top_values = logprobs.top_ids.tolist(), logprobs.top_values.tolist()
    sampled: list[SampledToken] = []
    for row, (sequence, token) in enumerate(zip(sequences, ids, strict=True)):
        i = logprobs.row_of.get(row)
        if i is None:
            sampled.append(SampledToken(sequence, token))
        else:
            num_top = sequence.request.sampling.logprobs
            top = tuple(zip(top_ids[i][:num_top], top_values[i][:num_top], strict=True))
            sampled.append(SampledToken(sequence, token, own[i], top))
    return sampled


def _indices(values: SequenceOf[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def _column(values: SequenceOf[float], like: Tensor) -> Tensor:
    """[r, 1] float32."""
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
