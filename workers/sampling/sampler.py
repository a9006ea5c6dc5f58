"""Logits to tokens, all rows of a step at once; a row pays only for what its request asks.

The order of operations is vLLM's: log-probabilities of the raw logits; bans (min_tokens) and logit bias; masks of
grammars; penalties; then the choice (see choice.py).
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...kernels.cpu.sample import RowSampler
from ..common.logit_bias import LogitBias
from ..common.request import SamplingParams
from ..core.sequence import SampledRow, SampledToken
from .choice import choose, choose_compiled, draw_of
from .grammar_masks import GrammarMasks, PendingMasks
from .penalties import Penalties


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Raw log-probabilities of the rows that asked for them."""

    asking: list[int]  # r rows of the logits
    raw: Tensor  # logits before anything changed them, of `raw_rows`
    raw_rows: Tensor  # [r] int64
    totals: Tensor  # [r] float32: the log of the sum of each row's exponentials
    top_ids: Tensor  # [r, k] int64
    top_logits: Tensor  # [r, k] float32


class Sampler:
    def __init__(
        self, eos_token_ids: tuple[int, ...], rows: RowSampler | None = None, masks: GrammarMasks | None = None
    ) -> None:
        """rows: the compiled kernels, where they are; torch samples without them. masks: of sequences that follow a
        grammar; None: no sequence does."""
        self._eos_token_ids, self._rows, self._masks = eos_token_ids, rows, masks
        self._penalties = Penalties()

    def is_argmax(self, sequences: SequenceOf[SampledRow], *, with_masks: bool) -> bool:
        """Return whether the largest logit of each row is all that `sample` would look for: nobody needs the others.
        with_masks: the largest among those that `begin_masks` allows."""
        return all(
            s.request.sampling.is_greedy
            and s.request.sampling.logprobs is None
            and not (changes_logits if with_masks else has_logits_processors)(s, s.num_output)
            for s in sequences
        )

    def begin_masks(self, sequences: SequenceOf[SampledRow]) -> PendingMasks | None:
        """Begin to make the masks of the rows that follow a grammar; None: none does."""
        return None if self._masks is None else self._masks.begin(sequences)

    def sample(self, logits: Tensor, sequences: SequenceOf[SampledRow]) -> list[SampledToken]:
        """logits: [R, vocab] float32, one row a sequence, changed in place. Returns one token a row."""
        return self.prepare(sequences)(logits)

    def prepare(self, sequences: SequenceOf[SampledRow]) -> Callable[[Tensor], list[SampledToken]]:
        """Prepare `sample`, before the logits are computed: meanwhile, masks are made."""
        return partial(self._sample, sequences, self.begin_masks(sequences))

    def _sample(
        self, sequences: SequenceOf[SampledRow], masks: PendingMasks | None, logits: Tensor
    ) -> list[SampledToken]:
        logprobs = self._raw_logprobs(logits, sequences)
        self._ban_and_bias(logits, sequences)
        if masks is not None:
            self._mask(logits, masks)
        self._penalties.apply(logits, sequences)
        if self._rows is not None:
            ids = choose_compiled(self._rows, logits, sequences)
        else:
            ids = choose(logits, sequences).tolist()
        if logprobs is None:
            return [SampledToken(sequence.sequence, token) for sequence, token in zip(sequences, ids, strict=True)]
        return _with_logprobs(sequences, ids, logprobs)

    def sample_next(
        self, sequences: SequenceOf[SampledRow], positions: SequenceOf[int]
    ) -> Callable[[Tensor], list[SampledToken]]:
        """Prepare `sample` by the compiled kernels for sequences that may be about to get a token before. positions: of
        the tokens to be chosen. Reads all that it needs of the sequences now; they must be `is_plain`."""
        rows, draws = self._rows, [draw_of(*pair) for pair in zip(sequences, positions, strict=True)]
        assert rows is not None

        def sample(logits: Tensor) -> list[SampledToken]:
            return [
                SampledToken(row.sequence, token)
                for row, token in zip(sequences, rows.sample(logits, draws), strict=True)
            ]

        return sample

    def logsumexp_top_k(self, logits: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """See kernels/sampling/logsumexp.py. logits: [R, vocab] float32."""
        if self._rows is not None:
            return self._rows.logsumexp_top_k(logits, range(len(logits)), num_top)
        top = logits.topk(num_top, dim=-1)
        return logits.logsumexp(dim=-1), top.indices, top.values

    def _raw_logprobs(self, logits: Tensor, sequences: SequenceOf[SampledRow]) -> _Logprobs | None:
        """Return log-probabilities of the rows that ask for them, before any logits change."""
        asking = [row for row, s in enumerate(sequences) if s.request.sampling.logprobs is not None]
        if not asking:
            return None
        rows = _indices(asking, logits)
        num_top = min(max(sequences[row].request.sampling.logprobs or 0 for row in asking), logits.shape[1])
        if self._rows is not None:
            totals, top_ids, top_logits = self._rows.logsumexp_top_k(logits, asking, num_top)
            if not any(has_logits_processors(s, s.num_output) for s in sequences):
                return _Logprobs(asking, logits, rows, totals, top_ids, top_logits)
            raw = logits[rows]
        else:
            raw = logits[rows]
            totals, top_ids, top_logits = self.logsumexp_top_k(raw, num_top)
        return _Logprobs(asking, raw, torch.arange(len(asking), device=raw.device), totals, top_ids, top_logits)

    def _ban_and_bias(self, logits: Tensor, sequences: SequenceOf[SampledRow]) -> None:
        """-inf for end-of-sequence and stop ids before min_tokens, and the logit bias."""
        banned: list[tuple[int, int]] = []
        biased: list[tuple[int, LogitBias]] = []
        for row, sequence in enumerate(sequences):
            sampling = sequence.request.sampling
            if sequence.num_output < sampling.min_tokens and not sampling.is_masked:  # else its mask bans them
                banned += [(row, token) for token in (*self._eos_token_ids, *sampling.stop_token_ids)]
            if sampling.logit_bias:
                biased.append((row, sampling.bias))
        _add(biased, logits)
        if banned:
            rows, ids = zip(*banned, strict=True)
            logits[_indices(rows, logits), _indices(ids, logits)] = -torch.inf

    def _mask(self, logits: Tensor, masks: PendingMasks) -> None:
        """-inf for all tokens that the grammars do not allow."""
        bits = torch.from_numpy(masks.masks())
        if self._rows is not None:
            self._rows.mask(logits, masks.rows, bits)
        else:
            token = torch.arange(logits.shape[1], device=logits.device)
            is_allowed = (bits.to(logits.device)[:, token // 32] >> (token % 32)) & 1
            rows = _indices(masks.rows, logits)
            logits[rows] = logits[rows].masked_fill_(is_allowed == 0, -torch.inf)


def _add(biased: SequenceOf[tuple[int, LogitBias]], logits: Tensor) -> None:
    """Add each bias to its row of logits."""
    if not biased:
        return
    rows = torch.tensor([row for row, _ in biased]).repeat_interleave(torch.tensor([len(bias) for _, bias in biased]))
    ids = torch.cat([torch.frombuffer(bias.token_ids, dtype=torch.int64) for _, bias in biased])
    biases = torch.cat([torch.frombuffer(bias.biases, dtype=torch.float32) for _, bias in biased])
    # No row has a token twice.
    logits[rows.to(logits.device), ids.to(logits.device)] += biases.to(logits.device)


def is_plain(sampling: SamplingParams) -> bool:
    """Return whether a token is chosen from logits, seed and position alone, whatever the tokens before it are."""
    return (
        sampling.logprobs is None
        and sampling.min_tokens == 0
        and not sampling.logit_bias
        and sampling.repetition_penalty == 1.0
        and sampling.presence_penalty == 0.0
        and sampling.frequency_penalty == 0.0
        and not sampling.is_masked
    )


def has_logits_processors(sequence: SampledRow, num_output: int) -> bool:
    """Return whether its logits are changed before the choice of the token after so many of its output."""
    return changes_logits(sequence, num_output) or sequence.request.sampling.is_masked


def changes_logits(sequence: SampledRow, num_output: int) -> bool:
    """Return whether they are changed otherwise than by a mask of the tokens that may follow, which also bans for
    min_tokens."""
    sampling = sequence.request.sampling
    return bool(
        sampling.logit_bias
        or (num_output < sampling.min_tokens and not sampling.is_masked)
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def _with_logprobs(sequences: SequenceOf[SampledRow], ids: list[int], logprobs: _Logprobs) -> list[SampledToken]:
    chosen = _indices([ids[row] for row in logprobs.asking], logprobs.raw)
    own: list[float] = (logprobs.raw[logprobs.raw_rows, chosen] - logprobs.totals).tolist()
    top_ids = logprobs.top_ids.tolist()
    top_values = (logprobs.top_logits - logprobs.totals[:, None]).tolist()
    sampled = [SampledToken(sequence.sequence, token) for sequence, token in zip(sequences, ids, strict=True)]
    for i, row in enumerate(logprobs.asking):
        num_top = sequences[row].request.sampling.logprobs
        top = tuple(zip(top_ids[i][:num_top], top_values[i][:num_top], strict=True))
        sampled[row] = SampledToken(sequences[row].sequence, ids[row], own[i], top)
    return sampled


def _indices(values: SequenceOf[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
