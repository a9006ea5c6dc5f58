"""Answers that are not streamed: their deltas are few, and say as much as those that came."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from diptych.cluster.common.quota import Quota
from diptych.cluster.front.text_completion import TextDelta
from diptych.cluster.front.whole_answers import MERGED_DELTAS, RUN, gather
from diptych.workers.common.request import FinishReason


async def batches(deltas: Sequence[TextDelta]) -> AsyncIterator[Sequence[TextDelta]]:
    for start in range(0, len(deltas), 100):
        yield deltas[start : start + 100]


def test_many_deltas_are_merged_in_runs_of_each_completion() -> None:
    num = 2 * MERGED_DELTAS + 10
    deltas = [TextDelta(i % 2, str(i % 10), (i,)) for i in range(num)]
    deltas += [TextDelta(i, "!", (num + i,), finish_reason=FinishReason.STOP, stop_token_id=7) for i in (0, 1)]
    with Quota(1, "full").share() as held:
        found = asyncio.run(gather(batches(deltas), held))
    assert len(found) < num / RUN + 200
    assert max(len(delta.token_ids) for delta in found) == RUN
    for index in (0, 1):
        own, came = ([d for d in some if d.index == index] for some in (found, deltas))
        assert "".join(d.text for d in own) == "".join(d.text for d in came)
        assert [i for d in own for i in d.token_ids] == [i for d in came for i in d.token_ids]
        assert (own[-1].finish_reason, own[-1].stop_token_id) == (FinishReason.STOP, 7)
        assert all(d.finish_reason is None for d in own[:-1])
