"""Expected tokens of a request: a function of its tokens and of all its sampling parameters, that a person can compute
by hand. A parameter that is lost, or an output that is taken for prompt on the way to another worker, gives another
token."""

import random
from collections.abc import Sequence

from diptych.workers.common.request import Request, SamplingParams

EOS = 0
STRIDE = 5  # of the tokens that a grammar allows
VOCAB_SIZE = 997
SALTS = (b"", b"another tenant")
Top = tuple[tuple[int, float], ...]


def next_token(token_ids: Sequence[int], num_prompt: int, sampling: SamplingParams, position: int) -> int:
    """The token at `position`, which follows `token_ids`, without a grammar."""
    output = token_ids[num_prompt:]
    penalties = 3 * sampling.frequency_penalty * sum(output) + 5 * sampling.presence_penalty * len(set(output))
    noise = 0 if sampling.is_greedy else (sampling.seed + 1) * (position - num_prompt + 1)
    scaled = sampling.repetition_penalty * sum(token_ids) + penalties
    return (int(scaled) + noise + sum(sampling.logit_bias)) % VOCAB_SIZE


def digest_of(output: Sequence[int], before: int = 0) -> int:
    """Digest that depends on each token and on their order."""
    for token_id in output:
        before = (31 * before + token_id + 1) % 10007
    return before


def forced(digest: int) -> int | None:
    """The only token that a grammar allows after an answer with this digest; None: it allows more. Three of four
    answers so far are followed by one, most by several in a row."""
    return -digest % STRIDE + STRIDE * (digest % 7) if digest % 4 else None


def constrained(token_id: int, output: list[int], sampling: SamplingParams) -> int:
    """The token that follows `output` where `token_id` would without a grammar and a budget: the first from it on that
    they allow."""
    digest = digest_of(output)
    only = forced(digest) if sampling.grammar is not None else None

    def allows(token_id: int) -> bool:
        return sampling.grammar is None or (token_id == only if only is not None else (token_id + digest) % STRIDE == 0)

    if (thought := sampling.thought) is not None and thought.end_id not in output:
        assert thought.is_open
        if len(output) >= thought.num_tokens and allows(thought.end_id):
            return thought.end_id
    is_early = len(output) < sampling.min_tokens and sampling.is_masked
    banned = {EOS, *sampling.stop_token_ids} if is_early else set[int]()
    if only in banned:
        return only
    following = ((token_id + i) % VOCAB_SIZE for i in range(VOCAB_SIZE))
    return next(t for t in following if t not in banned and allows(t))


def logprobs(token_id: int, position: int, sampling: SamplingParams) -> tuple[float | None, Top]:
    """Log-probabilities of the token at that position of the output, and of the most likely ones; multiples of 1/8,
    exact on the wire."""
    if sampling.logprobs is None:
        return None, ()
    logprob = -((token_id + position) % 64) / 8
    return logprob, tuple(((token_id + i) % VOCAB_SIZE, logprob - i) for i in range(sampling.logprobs))


def expected_output(request: Request) -> list[int]:
    sampling, ids, num_prompt = request.sampling, list(request.prompt_token_ids), len(request.prompt_token_ids)
    may_go_on = sampling.ignore_eos and sampling.grammar is None
    stops = {*(() if may_go_on else (EOS,)), *sampling.stop_token_ids}
    while len(ids) < num_prompt + sampling.max_tokens:
        ids.append(constrained(next_token(ids, num_prompt, sampling, len(ids)), ids[num_prompt:], sampling))
        if ids[-1] in stops and (sampling.grammar is not None or len(ids) >= num_prompt + sampling.min_tokens):
            break
    return ids[num_prompt:]


def choose_sampling(rng: random.Random, max_tokens: int) -> SamplingParams:
    """Often plain."""
    if rng.random() < 0.5:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return SamplingParams(
        temperature=rng.choice((0.0, 0.7)),
        seed=rng.randrange(1 << 32),
        repetition_penalty=rng.choice((1.0, 1.5)),
        presence_penalty=rng.choice((0.0, 1.0)),
        frequency_penalty=rng.choice((0.0, -2.0)),
        logit_bias={} if rng.random() < 0.7 else {rng.randrange(VOCAB_SIZE): 1.0},
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice((0, 0, 40)))),
        ignore_eos=rng.random() < 0.2,
        logprobs=rng.choice((None, None, 0, 3)),
    )
