"""Deltas whose number and order tokens alone decide."""

import random
from collections.abc import AsyncGenerator
from contextlib import aclosing

from diptych.cluster.front.retries.one_by_one import Turns, one_by_one
from diptych.cluster.front.text_completion import TextDelta
from diptych.cluster.routing.token_source import TokenDelta, TokenLogprob
from diptych.workers.common.request import FinishReason


def logprobs(*ids: int) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(i, -1.0) for i in ids)


async def test_each_token_has_what_is_its_own() -> None:
    closed: list[bool] = []

    async def deltas() -> AsyncGenerator[TokenDelta, None]:
        try:
            yield TokenDelta((5, 6, 7), logprobs(5, 6, 7), None, 3)
            yield TokenDelta((8, 9), logprobs(8, 9), FinishReason.LENGTH)
        finally:
            closed.append(True)

    found = [delta async for delta in one_by_one(deltas())]
    assert [d.token_ids for d in found] == [(5,), (6,), (7,), (8,), (9,)]
    assert [d.logprobs for d in found] == [logprobs(i) for i in (5, 6, 7, 8, 9)]
    assert [d.finish_reason for d in found] == [None] * 4 + [FinishReason.LENGTH]
    assert [d.num_cached_tokens for d in found] == [3, 0, 0, 0, 0]
    async with aclosing(one_by_one(deltas())) as stream:
        await anext(stream)
    assert closed == [True, True], "closing it closes what it reads"


def test_turns_do_not_depend_on_when_deltas_come() -> None:
    lengths = [4, 1, 6]
    whole = [
        [TextDelta(i, str(k), (k,), finish_reason=FinishReason.STOP if k == num - 1 else None) for k in range(num)]
        for i, num in enumerate(lengths)
    ]
    expected = [(i, str(k)) for k in range(6) for i in range(3) if k < lengths[i]]
    random_ = random.Random(2)
    for _ in range(50):
        left, turns, found = [list(each) for each in whole], Turns[TextDelta](3), list[TextDelta]()
        while any(left):
            own = random_.choice([each for each in left if each])
            num = random_.randint(1, len(own))
            batch = [own.pop(0) for _ in range(num)]
            found += turns.take(batch)
        assert [(d.index, d.text) for d in found] == expected
