"""Sequences for tests of the torch-free core."""

import itertools

from diptych.workers.common.request import USUAL_LEVEL, Request, RequestLevel, SamplingParams
from diptych.workers.core.sequence import Sequence

_numbers = itertools.count()


def make_request(prompt: list[int], max_tokens: int = 8, **sampling: object) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return Request(f"request-{next(_numbers)}", tuple(prompt), params, timeout_s=60.0)


def make_sequence(
    prompt: list[int],
    max_tokens: int = 8,
    salt: bytes = b"",
    level: RequestLevel = USUAL_LEVEL,
    tenant: bytes = b"",
) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    request = Request("request", tuple(prompt), params, timeout_s=60.0, cache_salt=salt, tenant=tenant, level=level)
    number = next(_numbers)
    return Sequence(f"0/{number}", request, list(prompt), len(prompt), deadline=1e9, arrival=number)
