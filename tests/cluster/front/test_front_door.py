"""Limits of a call, and the defaults of its fields."""

import asyncio
from typing import Any

import pytest

from diptych.cluster.front.front_door import GenerationSpec, choice_seed
from diptych.cluster.front.generation import Generation
from diptych.cluster.front.limits import RequestLimits
from diptych.cluster.tokens.prompt_encoding import ChatPrompt
from diptych.workers.common.errors import InvalidRequest, Overloaded, PromptTooLong, Unavailable, UnknownModel
from diptych.workers.common.request import SamplingParams

from ...support.front import CONTEXT, Echo, front_door


def start(source: Echo | None = None, limits: RequestLimits | None = None, **spec: Any) -> Generation:
    given = {"prompts": ("hello",), "sampling": SamplingParams()} | spec

    async def main() -> Generation:
        door = front_door(source or Echo(), limits)
        try:
            return await door.start(GenerationSpec(**given), "call")
        finally:
            await door.close()

    return asyncio.run(main())


def test_what_is_not_given_is_chosen() -> None:
    request = start().completions[0].request
    assert request.request_id == "call-0"
    assert request.prompt_token_ids == tuple(b"hello")
    assert request.timeout_s == 600.0
    assert request.sampling.max_tokens == CONTEXT - 5
    assert start(default_max_tokens=16).completions[0].request.sampling.max_tokens == 16
    long = start(prompts=("x" * (CONTEXT - 3),), default_max_tokens=16)
    assert long.completions[0].request.sampling.max_tokens == 3
    assert start(max_tokens=7, default_max_tokens=16).completions[0].request.sampling.max_tokens == 7
    assert start(timeout_s=2.5).completions[0].request.timeout_s == 2.5


def test_the_cache_salt_goes_along() -> None:
    assert start().completions[0].request.cache_salt == b""
    assert [c.request.cache_salt for c in start(cache_salt="é", n=2).completions] == ["é".encode()] * 2


def test_seeds_of_choices() -> None:
    seeds = [c.request.sampling.seed for c in start(prompts=("a", "b"), n=3, seed=5).completions]
    assert seeds[:3] == seeds[3:] == [5, choice_seed(5, 1), choice_seed(5, 2)]
    assert len(set(seeds)) == 3
    assert start(seed=-1).completions[0].request.sampling.seed == (1 << 64) - 1


def test_the_mix_is_splitmix64() -> None:
    # The first outputs of SplitMix64 from seed 1234567, as its authors' reference prints them.
    assert [choice_seed(1234567, i) for i in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_drawn_seeds_differ_between_prompts_and_calls() -> None:
    drawn = [c.request.sampling.seed for _ in range(3) for c in start(prompts=("a", "a")).completions]
    assert len(set(drawn)) == 6
    assert all(0 <= seed < 1 << 64 for seed in drawn)


def test_a_conversation_is_rendered_and_gets_no_special_tokens_twice() -> None:
    request = start(prompts=(ChatPrompt([{"role": "user", "content": "hi"}]),)).completions[0].request
    assert request.prompt_token_ids == (258, *b"hi", 256, 259)


@pytest.mark.parametrize(
    ("spec", "param", "words"),
    [
        ({"n": 0}, "n", r"n must be in \[1, 128\], got 0"),
        ({"n": 10_000}, "n", "got 10000"),
        ({"n": 65, "prompts": ("a", "b")}, "n", "130 completions"),
        ({"prompts": ("a",) * 129}, "prompt", "129 completions"),
        ({"prompts": ()}, "prompt", "empty"),
        ({"prompts": ("",)}, "prompt", "empty"),
        ({"prompts": ((),)}, "prompt", "empty"),
        ({"prompts": (ChatPrompt([]),)}, "messages", "empty"),
        ({"prompts": ((1, 260),)}, "prompt", "token id 260 is out of vocabulary"),
        ({"stop": ("x",) * 17}, "stop", "at most 16"),
        ({"stop": ("",)}, "stop", "1 to 1024"),
        ({"stop": ("x" * 1025,)}, "stop", "1 to 1024"),
        ({"timeout_s": 0.0}, "timeout_s", "timeout_s must be in"),
        ({"timeout_s": 601.0}, "timeout_s", "timeout_s must be in"),
        ({"timeout_s": float("nan")}, "timeout_s", "timeout_s must be in"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"cache_salt": "é" * 129}, "cache_salt", "258 bytes; at most 256"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature", "temperature"),
    ],
)
def test_what_is_out_of_bounds_is_named(spec: dict[str, Any], param: str, words: str) -> None:
    source = Echo()
    with pytest.raises(InvalidRequest, match=words) as caught:
        start(source, **spec)
    assert caught.value.param == param
    assert source.requests == []


@pytest.mark.parametrize("prompt", ["x" * CONTEXT, "x" * 100_000, tuple(b"x" * CONTEXT)])
def test_a_prompt_beyond_the_context(prompt: str | tuple[int, ...]) -> None:
    with pytest.raises(PromptTooLong, match="reduce the length"):
        start(prompts=(prompt,))


def test_max_tokens_beyond_the_context() -> None:
    with pytest.raises(PromptTooLong, match=f"ask for at most {CONTEXT - 5}") as caught:
        start(max_tokens=CONTEXT)
    assert caught.value.param == "max_tokens"


def test_refused_at_the_door_before_it_costs() -> None:
    source = Echo()
    source.admit_error = Overloaded("full")
    with pytest.raises(Overloaded):
        start(source, prompts=("x" * 100_000,))
    with pytest.raises(Overloaded):  # 101 sequences in two prompts are too many for this source
        start(prompts=("a",) * 101)


def test_the_model_is_the_served_one() -> None:
    assert start(model="echo").completions
    with pytest.raises(UnknownModel, match="'gpt' is not served here: use 'echo'"):
        start(model="gpt")
    source = Echo()
    source.model_error = Unavailable("no worker yet")
    with pytest.raises(Unavailable):
        start(source)
