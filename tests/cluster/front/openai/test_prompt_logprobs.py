"""`echo` with `logprobs`, and vLLM's `prompt_logprobs`, with the official client. A token is a byte: see front.py."""

from collections.abc import Generator
from typing import Any

import grpc
import openai
import pytest
from tokenizers import processors

from diptych.cluster.front import limits
from diptych.cluster.front.openai.prompt_logprobs import text_offsets
from diptych.cluster.tokens.tokenizer import Tokenizer
from diptych.proto import inference_pb2 as pb
from diptych.proto import inference_pb2_grpc

from ....support.front import Echo, Served, byte_backend, served


@pytest.fixture
def server() -> Generator[Served]:
    with served(Echo()) as it:
        yield it


@pytest.fixture
def client(server: Served) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as it:
        yield it


@pytest.mark.parametrize("prompt", ["h€y", list("h€y".encode())])
def test_echo_with_logprobs_tells_those_of_the_prompt_first(client: openai.OpenAI, prompt: str | list[int]) -> None:
    answer = client.completions.create(model="echo", prompt=prompt, echo=True, logprobs=2, max_tokens=1)
    [choice] = answer.choices
    assert choice.text == "h€yh" and choice.finish_reason == "length"
    found, ids = choice.logprobs, [*"h€y".encode(), *b"h"]
    assert found is not None and found.token_logprobs is not None and found.top_logprobs is not None
    assert found.tokens == ["h", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "y", "h"]
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == [pytest.approx(-i / 100) for i in ids[1:]]
    assert found.top_logprobs[0] is None
    assert [list(top) for top in found.top_logprobs[4:6]] == [["y", "z"], ["h", "i"]]
    assert found.text_offset == [0, 1, 1, 1, 2, 3]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_loglikelihood_of_token_ids_as_lm_eval_asks_for_it(client: openai.OpenAI, max_tokens: int) -> None:
    """Several prompts of token ids, greedy, with no or one output token. lm-eval reads `[ctxlen:-1]` of each."""
    prompts = [list(b"hello"), list(b"you"), list(b"x")]
    answer = client.completions.create(
        model="echo", prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1234
    )
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        assert choice.text == (bytes(prompt) + bytes(prompt[:max_tokens])).decode()
        assert choice.finish_reason == "length" and choice.logprobs is not None
        logprobs, top = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        assert logprobs is not None and top is not None and len(logprobs) == len(top) == len(prompt) + max_tokens
        assert logprobs[0] is None and top[0] is None
        for own, tops, token in zip(logprobs[1:], top[1:], [*prompt[1:], *prompt[:max_tokens]], strict=True):
            assert own is not None and tops is not None
            assert own == pytest.approx(-token / 100) and own == max(tops.values())
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (3 * max_tokens, 9)


def test_echoed_token_ids_show_special_tokens_and_offsets_count_them(client: openai.OpenAI) -> None:
    """For a prompt of ids, the echoed text is that of all its tokens; for a text, it is the sent text."""
    ids = [258, *"h€".encode(), 256, *b"y", 0xE2, 259]  # user, h, €, end, y, the beginning of a character, assistant
    for prompt, text in ((ids, "<|user|>h€<|end|>y\ufffd<|assistant|>"), ("<|user|>h<|end|>", "<|user|>h<|end|>")):
        [choice] = client.completions.create(model="echo", prompt=prompt, echo=True, logprobs=0, max_tokens=0).choices
        assert choice.text == text and choice.logprobs is not None
        offsets = choice.logprobs.text_offset
        assert offsets is not None
        assert offsets == ([0, 8, 9, 9, 9, 10, 17, 18, 19] if prompt == ids else [0, 8, 9])


def test_text_offsets_leave_out_what_the_tokenizer_puts_around_a_text() -> None:
    backend = byte_backend()
    backend.post_processor = processors.TemplateProcessing(
        "<|user|> $0 <|end|>", special_tokens=[("<|user|>", 258), ("<|end|>", 256)]
    )
    tokenizer = Tokenizer(backend, {}, None)
    for text, offsets in (("a€b", [0, 0, 1, 1, 1, 2, 3]), ("<|user|>a", [0, 8, 8, 9])):
        assert list(text_offsets(tokenizer.encode(text), text, tokenizer)) == offsets


def test_a_token_is_the_first_of_those_that_are_told_in_its_place(client: openai.OpenAI, server: Served) -> None:
    """As vLLM writes them: also where others are likelier, and where tokens are named by ids."""
    server.source.num_likelier = 2
    [choice] = client.completions.create(
        model="echo",
        prompt="ab",
        echo=True,
        logprobs=1,
        max_tokens=1,
        extra_body={"return_tokens_as_token_ids": True},
    ).choices
    assert choice.logprobs is not None and choice.logprobs.top_logprobs is not None
    assert choice.logprobs.tokens == ["token_id:97", "token_id:98", "token_id:97"]
    assert [list(top) for top in choice.logprobs.top_logprobs[1:]] == [
        ["token_id:98", "token_id:96"],
        ["token_id:97", "token_id:95"],
    ]


def test_without_echo_no_tokens_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="echo", prompt="hi", max_tokens=0)


def test_siblings_have_the_logprobs_that_their_prompt_was_computed_for_once(
    client: openai.OpenAI, server: Served
) -> None:
    ask: dict[str, Any] = {
        "model": "echo",
        "prompt": ["abc", "de"],
        "n": 2,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 2,
    }
    whole = client.completions.create(**ask).choices
    requests = sorted(server.source.requests, key=lambda r: r.request_id)
    assert [r.sampling.prompt_logprobs for r in requests] == [1, None, 1, None]
    assert [c.text for c in whole] == ["abcab", "abcab", "dede", "dede"]
    for one, other in (whole[:2], whole[2:]):
        assert one.logprobs == other.logprobs and one.logprobs is not None
    streamed: dict[int, list[Any]] = {i: [] for i in range(4)}
    for chunk in client.completions.create(**ask, stream=True):
        streamed[chunk.choices[0].index].append(chunk.choices[0])
    for choice in whole:
        chunks = streamed[choice.index]
        assert "".join(chunk.text for chunk in chunks) == choice.text
        for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [value for chunk in chunks if chunk.logprobs for value in getattr(chunk.logprobs, column)]
            assert joined == getattr(choice.logprobs, column)


def test_prompt_logprobs_of_completions_and_chats(client: openai.OpenAI) -> None:
    ask: Any = {"prompt_logprobs": 2}
    completion: Any = client.completions.create(model="echo", prompt=["abz", "de"], max_tokens=1, extra_body=ask)
    first, found, _ = completion.choices[0].prompt_logprobs
    assert first is None and completion.choices[0].logprobs is None
    assert list(found) == ["98", "99"]
    assert found["98"] == {"logprob": pytest.approx(-0.98), "rank": 98, "decoded_token": "b"}
    assert found["99"] == {"logprob": pytest.approx(-0.99), "rank": 2, "decoded_token": "c"}
    assert len(completion.choices[1].prompt_logprobs) == 2
    chat: Any = client.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "hi"}], max_tokens=1, n=2, extra_body={"prompt_logprobs": 0}
    )
    assert [None if p is None else list(p) for p in chat.prompt_logprobs] == [None, ["104"], ["105"], ["256"], ["259"]]
    chat = client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "hi"}], max_tokens=1)
    assert chat.prompt_logprobs is None
    assert client.completions.create(model="echo", prompt="hi", max_tokens=1).choices[0].prompt_logprobs is None  # type: ignore[attr-defined]


def test_echo_and_prompt_logprobs_may_ask_for_different_numbers(client: openai.OpenAI) -> None:
    answer: Any = client.completions.create(
        model="echo", prompt="abc", echo=True, logprobs=1, max_tokens=1, extra_body={"prompt_logprobs": 3}
    )
    [choice] = answer.choices
    assert [len(top) for top in choice.logprobs.top_logprobs[1:]] == [1, 1, 1]
    assert [len(top) for top in choice.prompt_logprobs[1:]] == [3, 3]


@pytest.mark.parametrize(
    ("ask", "param"),
    [
        ({"extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs"),
        ({"extra_body": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": -1}, "logprobs"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client: openai.OpenAI, ask: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="echo", prompt="abc", **ask)
    assert caught.value.param == param


def test_the_product_of_prompts_alternatives_and_choices_is_bounded(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, server: Served
) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", 2 * 3 * 5 * 4)
    ask: dict[str, Any] = {"model": "echo", "prompt": ["abcde"] * 2, "echo": True, "logprobs": 2, "max_tokens": 1}
    assert len(client.completions.create(**ask, n=4).choices) == 8
    with pytest.raises(openai.BadRequestError, match="150 numbers or more") as caught:
        client.completions.create(**ask, n=5)
    assert caught.value.param == "prompt_logprobs"


def test_grpc_tells_prompt_logprobs_before_the_first_token(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.cluster.front.grpc.api.MAX_POSITIONS", 1)
    sampling = pb.SamplingParams(prompt_logprobs=1, max_tokens=2)
    with grpc.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        answers = list(stub.Generate(pb.GenerateRequest(text="abz", sampling=sampling, n=2)))
    found = [entry for answer in answers for entry in answer.prompt_logprobs]
    assert [(e.token_id, e.token, e.rank) for e in found] == [(98, "b", 98), (122, "z", 122)]
    assert [e.logprob for e in found] == [pytest.approx(-0.98), pytest.approx(-1.22)]
    assert [(t.token_id, t.token) for t in found[0].top] == [(98, "b")]
    indices = [i for i, answer in enumerate(answers) if answer.prompt_logprobs]
    assert max(indices) < min(i for i, answer in enumerate(answers) if answer.index == 0 and answer.token_ids)
