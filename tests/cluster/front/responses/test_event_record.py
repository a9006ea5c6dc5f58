"""The events of a response in the background, read from anywhere, while they come and afterwards."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.cluster.front.responses.event_record import EventRecord
from diptych.cluster.front.retries.event_ids import END, Unnumbered

EVENTS = [f"data: {i}{END}" for i in range(7)]


async def read(record: EventRecord, num_seen: int) -> list[str]:
    return [chunk async for chunk in record.after(num_seen)]


@given(st.lists(st.integers(0, len(EVENTS)), max_size=5), st.integers(0, len(EVENTS)))
def test_each_reader_gets_what_it_has_not_seen(cuts: list[int], num_seen: int) -> None:
    """However the events came together."""

    async def main() -> None:
        record = EventRecord(1.0)
        bounds = [0, *sorted(cuts), len(EVENTS)]
        early = asyncio.create_task(read(record, num_seen))
        for begin, end in pairwise(bounds):
            record.add("".join(EVENTS[begin:end]))
            await asyncio.sleep(0)
        record.end()
        assert "".join(await early) == "".join(await read(record, num_seen)) == "".join(EVENTS[num_seen:])
        assert record.num_events == len(EVENTS)

    asyncio.run(main())


@pytest.mark.parametrize("num_seen", [0, 1])
def test_events_without_numbers_stay_so(num_seen: int) -> None:
    async def main() -> None:
        record = EventRecord(1.0)
        record.add(Unnumbered(EVENTS[0] + EVENTS[1]))
        record.end()
        first, *rest = await read(record, num_seen)
        assert first == "" and [type(chunk) for chunk in rest] == [Unnumbered]

    asyncio.run(main())
