"""Tokens become text, n streams become one, and every stream is closed however it ends."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from diptych.cluster.common.timings import RequestTimings
from diptych.cluster.front.generation import MAX_UNREAD_DELTAS, Generation
from diptych.cluster.front.text_completion import TextCompletion, TextDelta
from diptych.cluster.routing.token_source import TokenDelta, TokenLogprob
from diptych.cluster.tokens.stop_strings import StopStrings, StopTable
from diptych.workers.common.errors import (
    DeadlineExceeded,
    DiptychError,
    InternalError,
    OutOfBlocks,
    RequestAborted,
    WorkerLost,
)
from diptych.workers.common.request import FinishReason, Request, SamplingParams

from ...support.front import END, Echo, byte_tokenizer

TOKENIZER = byte_tokenizer()


def completion(
    prompt: str = "abc", *, index: int = 0, stop: tuple[str, ...] = (), timeout_s: float = 60, **sampling: int
) -> TextCompletion:
    request = Request(f"r-{index}", tuple(prompt.encode()), SamplingParams(**{"max_tokens": 6} | sampling), timeout_s)
    return TextCompletion(index, request, TOKENIZER.detokenizer(), StopStrings(StopTable(stop)))


def delta(text: str, finish: FinishReason | None = None, extra: tuple[int, ...] = ()) -> TokenDelta:
    return TokenDelta((*text.encode(), *extra), finish_reason=finish)


async def read(generation: Generation) -> list[TextDelta]:
    async with aclosing(generation.batches()) as batches:
        return [text async for batch in batches for text in batch]


def test_text_follows_tokens() -> None:
    c = completion()
    assert c.push(delta("ab")) == TextDelta(0, "ab", (97, 98))
    assert c.push(TokenDelta((0xC3,))) == TextDelta(0, "", (0xC3,))
    assert c.push(TokenDelta((0xA9,), finish_reason=FinishReason.LENGTH)) == TextDelta(
        0, "é", (0xA9,), finish_reason=FinishReason.LENGTH
    )
    assert c.num_tokens == 4


def test_the_token_that_ends_it_is_no_text() -> None:
    c = completion()
    last = c.push(delta("ab", FinishReason.STOP, extra=(ord("!"),)))  # a stop token, though "!" would be text
    assert (last.text, last.token_ids, last.finish_reason) == ("ab", (97, 98, 33), FinishReason.STOP)


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    c = completion()
    assert c.push(TokenDelta((0xE2,))).text == ""
    assert c.push(TokenDelta((0x82,), finish_reason=FinishReason.LENGTH)).text == "\ufffd"


def test_a_stop_string_ends_the_text_before_it_and_the_tokens_with_it() -> None:
    c = completion(stop=("cd", "zz"))
    assert c.push(delta("abc")).text == "ab"
    last = c.push(delta("def", FinishReason.LENGTH))
    assert last == TextDelta(0, "", (ord("d"),), finish_reason=FinishReason.STOP, stop_string="cd")
    assert c.num_tokens == 4


def test_timings_are_the_newest_ones_and_end_with_it() -> None:
    c = completion(stop=("d",))
    assert c.timings is None
    c.push(replace(delta("a"), elapsed_s=1.0, timings=RequestTimings(0.5, 0.5, 0)))
    second = RequestTimings(0.5, 0.5, 0, first_decode_s=1)
    c.push(replace(delta("b"), elapsed_s=2.0, timings=second))
    c.push(replace(delta("c"), elapsed_s=3.0))
    c.push(replace(delta("d"), elapsed_s=4.0))
    assert c.timings == replace(second, total_s=4.0)


def test_held_text_is_shown_when_nothing_follows() -> None:
    c = completion(stop=("cdx",))
    assert c.push(delta("abcd")).text == "ab"
    assert c.push(TokenDelta((END,), finish_reason=FinishReason.STOP)).text == "cd"


def test_stop_strings_wait_for_min_tokens() -> None:
    c = completion(stop=("b",), min_tokens=2)
    assert c.push(delta("a")).text == "a"
    assert c.push(delta("b")).finish_reason is None
    assert c.push(delta("b")).stop_string == "b"


def test_log_probabilities_say_where_their_tokens_begin() -> None:
    c = completion(stop=("!",))
    entries = tuple(TokenLogprob(i, -0.5) for i in "é!x".encode())
    got = c.push(TokenDelta(tuple("é!x".encode()), entries))
    assert got.logprobs == entries[:3]
    assert got.offsets == (0, 0, 1)
    assert got.text == "é"


async def test_merges_choices_and_counts_usage() -> None:
    source = Echo()
    generation = Generation(source, "r", [completion("ab", index=i) for i in range(4)], n=2)
    got = await read(generation)
    for i in range(4):
        assert "".join(d.text for d in got if d.index == i) == "ababab"
    assert [d.index for d in got[:4]] == [0, 1, 2, 3]  # side by side, not one after the other
    usage = generation.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (4, 24, 6)
    assert sorted(source.closed) == ["r-0", "r-1", "r-2", "r-3"]


async def test_a_stop_string_closes_the_token_stream_and_leaves_the_others() -> None:
    source = Echo()
    stopped = TextCompletion(0, completion("abc").request, TOKENIZER.detokenizer(), StopStrings(StopTable(["c"])))
    got = await read(Generation(source, "r", [stopped, completion("xyz", index=1)], n=1))
    assert "".join(d.text for d in got if d.index == 0) == "ab"
    assert "".join(d.text for d in got if d.index == 1) == "xyzxyz"
    assert source.closed == ["r-0", "r-1"]


async def test_closing_early_closes_every_stream() -> None:
    source = Echo()
    source.gate.clear()
    source.gate_after = 1
    generation = Generation(source, "r", [completion(index=i) for i in range(3)], n=3)
    async with aclosing(generation.batches()) as batches:
        assert await anext(batches)
        assert source.closed == []
    assert sorted(source.closed) == ["r-0", "r-1", "r-2"]
    assert len(asyncio.all_tasks()) == 1


async def test_the_first_error_ends_all_after_what_came_before_it() -> None:
    source = Echo()
    source.fail = lambda made: WorkerLost("gone") if made == 2 else None

    async def main() -> str:
        text = ""
        generation = Generation(source, "r", [completion(index=i) for i in range(2)], n=2)
        with pytest.raises(WorkerLost):
            async with aclosing(generation.batches()) as batches:
                async for batch in batches:
                    text += "".join(d.text for d in batch if d.index == 0)
        assert len(asyncio.all_tasks()) == 1
        return text

    assert await main() == "ab"
    assert sorted(source.closed) == ["r-0", "r-1"]


async def test_a_request_that_outlives_its_deadline_is_aborted() -> None:
    source = Echo()
    source.gate.clear()
    with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
        await read(Generation(source, "r", [completion(timeout_s=0.01)], n=1))
    assert source.closed == ["r-0"]


class Odd(Echo):
    def __init__(self, *deltas: TokenDelta, error: BaseException | None = None) -> None:
        super().__init__()
        self.deltas = deltas
        self.error = error

    async def stream(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        for one in self.deltas:
            yield one
        if self.error:
            raise self.error


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (Odd(delta("a")), InternalError),
        (Odd(delta("a"), error=OutOfBlocks("full")), OutOfBlocks),
        (Odd(delta("a"), error=asyncio.CancelledError()), RequestAborted),
        (Odd(delta("a"), error=ZeroDivisionError()), ZeroDivisionError),
        (Odd(delta("a", FinishReason.ABORT)), RequestAborted),
    ],
)
async def test_odd_endings_are_errors(source: Odd, error: type[DiptychError]) -> None:
    with pytest.raises(error):
        await read(Generation(source, "r", [completion()], n=1))


@pytest.mark.parametrize("n", [1, 2])
async def test_the_deadline_closes_streams_that_nobody_reads(n: int) -> None:
    source = Echo()
    source.gate_after = 3
    source.gate.clear()
    completions = [completion(index=i, timeout_s=0.05, max_tokens=100) for i in range(n)]
    generation = Generation(source, "r", completions, n)
    async with aclosing(generation.batches()) as batches:
        assert await anext(batches)
        while len(source.closed) < n:  # while the reader is elsewhere
            await asyncio.sleep(0.001)
        with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
            while True:
                await anext(batches)


async def test_what_waits_for_a_slow_reader_is_bounded() -> None:
    source = Echo()
    num_tokens = 10 * MAX_UNREAD_DELTAS

    async def main() -> int:
        completions = [completion(index=i, max_tokens=num_tokens) for i in range(2)]
        num_read = 0
        async with aclosing(Generation(source, "r", completions, 2).batches()) as batches:
            async for batch in batches:
                num_read += sum(len(delta.token_ids) for delta in batch)
                before = -1
                while source.num_delivered > before:  # until the streams wait for the reader
                    before = source.num_delivered
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                assert source.num_delivered - num_read <= MAX_UNREAD_DELTAS + 2
        return num_read

    assert await asyncio.wait_for(main(), 60) == 2 * num_tokens
