"""Bounds on the log-probabilities of answers that are not streamed: of one answer, and of all that are being collected.

A log-probability takes about 120 bytes until its answer is sent, and 5 microseconds to write. So those of a call are
checked before it starts, and those of all calls while they come.
"""

from collections.abc import AsyncIterable, Sequence
from dataclasses import replace

from ...workers.common.errors import InvalidRequest
from ..common.quota import QuotaShare
from .front_door import GenerationSpec
from .text_completion import TextDelta

MERGED_DELTAS = 8192  # deltas of a call that are merged at once
RUN = 64  # of them make one: tokens of thoughts are counted by deltas


def bounded(
    spec: GenerationSpec, max_logprobs: int, remedy: str = "without streaming: send stream=true, or ask for fewer"
) -> GenerationSpec:
    """`spec` with a default for max_tokens that keeps the answer within the bound. Raises InvalidRequest where its
    own max_tokens does not."""
    if spec.sampling.logprobs is None:
        return spec
    a_token = len(spec.prompts) * spec.n * (spec.sampling.logprobs + 1)
    most = max_logprobs // a_token if a_token else max_logprobs
    if spec.max_tokens is None and most:
        default = most if spec.default_max_tokens is None else min(spec.default_max_tokens, most)
        return replace(spec, default_max_tokens=default)
    if (spec.max_tokens or 1) > most:
        raise InvalidRequest(
            f"the answer may have {a_token * (spec.max_tokens or 1)} log-probabilities (completions x max_tokens x "
            f"(alternatives + 1)), at most {max_logprobs} {remedy}",
            param="max_tokens",
        )
    return spec


async def gather(batches: AsyncIterable[Sequence[TextDelta]], held: QuotaShare) -> list[TextDelta]:
    """All deltas of a generation. `held` counts their log-probabilities. Raises Overloaded where there are too many."""
    found: list[TextDelta] = []
    num_merged = 0
    async for batch in batches:
        for delta in batch:
            if delta.logprobs:
                held.take(num_logprobs(delta))
        found += batch
        if len(found) - num_merged >= MERGED_DELTAS:
            found[num_merged:] = _merged(found[num_merged:])
            num_merged = len(found)
    return found


def num_logprobs(delta: TextDelta) -> int:
    return sum(1 + len(entry.top) for entry in delta.logprobs)


def _merged(deltas: Sequence[TextDelta]) -> list[TextDelta]:
    """`deltas` with those of each completion merged in runs, except deltas with log-probabilities."""
    if any(delta.logprobs for delta in deltas):
        return list(deltas)
    own: dict[int, list[TextDelta]] = {}
    for delta in deltas:
        own.setdefault(delta.index, []).append(delta)
    return [
        replace(
            parts[0],
            text="".join(part.text for part in parts),
            token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
            finish_reason=parts[-1].finish_reason,
            stop_string=parts[-1].stop_string,
            stop_token_id=parts[-1].stop_token_id,
        )
        for all_of_one in own.values()
        for parts in (all_of_one[start : start + RUN] for start in range(0, len(all_of_one), RUN))
    ]
