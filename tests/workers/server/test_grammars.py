"""Grammars of submitted requests, over a worker's gRPC service: compiled beside the engine, refused, aborted."""

import re
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import tokenizers

from diptych.proto import inference_pb2, worker_pb2
from diptych.workers.common.request import Grammar, GrammarKind, Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.grammar.compiler import CompiledGrammar, GrammarCompiler
from diptych.workers.server.service import WorkerService
from diptych.workers.testing.fake_runner import FakeRunner

from ...support.sequences import make_request
from .test_service import Router

TINY = Path(__file__).parents[3] / "examples" / "tiny"
WORD = Grammar(GrammarKind.REGEX, "[a-f]{3,8}!")


@asynccontextmanager
async def worker(model: Path = TINY) -> AsyncGenerator[tuple[WorkerService, Router]]:
    service = WorkerService(WorkerConfig.of(model=model, transports=("grpc",)), FakeRunner(vocab_size=2048))
    where = await service.start()
    try:
        yield service, Router(where.address)
    finally:
        await service.stop(grace_s=0.0)


def request_with(grammar: Grammar) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=40, grammar=grammar)
    return Request("request", (5, 6, 7), sampling, timeout_s=60.0)


async def test_an_answer_over_the_wire_follows_its_grammar() -> None:
    async with worker() as (_, router):
        for handle in (1, 2):  # compiled for the first, found for the second
            await router.submit(handle, request_with(WORD))
            ids = [token for _, token in await router.tokens(handle)]
            text = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json")).decode(ids[:-1])
            assert re.fullmatch(WORD.text, text) and ids[-1] == 0


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (inference_pb2.Grammar(kind=inference_pb2.GRAMMAR_KIND_REGEX, text="(a"), "unclosed group"),
        (inference_pb2.Grammar(kind=inference_pb2.GRAMMAR_KIND_REGEX, text="a" * 300_000), "more than"),
        (inference_pb2.Grammar(kind=inference_pb2.GRAMMAR_KIND_REGEX), "is empty"),
        (inference_pb2.Grammar(text="a"), "kind of the grammar is unknown"),
    ],
    ids=["wrong", "long", "empty", "unknown"],
)
async def test_a_grammar_that_no_router_would_send_is_refused(grammar: inference_pb2.Grammar, why: str) -> None:
    async with worker() as (_, router):
        submit = worker_pb2.Submit(sampling=inference_pb2.SamplingParams(grammar=grammar))
        await router.submit(1, make_request([1, 2]), sampling=submit.sampling)
        failed = (await router.read("failed")).failed
        assert failed.error == "InvalidGrammar" and why in failed.message and not failed.retryable
        assert (await router.idle_state()).num_unaccounted_blocks == 0


async def test_a_source_whose_grammar_is_refused_ends_its_hand_off() -> None:
    async with worker() as (_, router):
        bad = Grammar(GrammarKind.REGEX, "(a")
        await router.submit(1, request_with(bad), offer=worker_pb2.HandoffOffer(handoff_id="h"))
        assert (await router.read("failed")).failed.error == "InvalidGrammar"
        assert (await router.idle_state()).num_open_handoffs == 0
        await router.submit(2, request_with(WORD), offer=worker_pb2.HandoffOffer(handoff_id="i"))
        await router.tokens(2, until_finished=False)


async def test_a_worker_without_a_tokenizer_refuses_grammars_and_serves_others(tmp_path: Path) -> None:
    async with worker(tmp_path) as (_, router):
        await router.submit(1, request_with(WORD))
        failed = (await router.read("failed")).failed
        assert failed.error == "InvalidGrammar" and "tokenizer.json" in failed.message
        await router.submit(2, make_request([1, 2], 3))
        assert len(await router.tokens(2)) == 3


def waiting_compiler(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let grammars be compiled no sooner than the event that is returned is set."""
    may_go_on, compile_grammar = threading.Event(), GrammarCompiler.compile

    def slow(self: GrammarCompiler, grammar: Grammar) -> CompiledGrammar:
        assert may_go_on.wait(60)
        return compile_grammar(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    return may_go_on


async def test_others_are_served_while_a_grammar_is_compiled_and_its_request_may_be_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler waits for the test: by then another request has ended, and this one has been aborted."""
    may_go_on = waiting_compiler(monkeypatch)
    async with worker() as (_, router):
        try:
            await router.submit(1, request_with(WORD))
            await router.submit(2, make_request([1, 2], 3))
            assert len(await router.tokens(2)) == 3
            await router.send(abort=worker_pb2.Abort(handle=1))
            await router.submit(3, make_request([1, 2], 3))
            assert len(await router.tokens(3)) == 3
        finally:
            may_go_on.set()
        await router.submit(4, request_with(WORD))
        assert (await router.tokens(4))[-1][1] == 0
        state = await router.idle_state()
        assert state.load.num_free_blocks == state.load.num_blocks


async def test_a_handle_is_in_use_until_the_grammar_of_its_aborted_request_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No router uses one twice. Both requests would be submitted to the engine by the same key."""
    may_go_on = waiting_compiler(monkeypatch)
    async with worker() as (_, router):
        try:
            await router.submit(1, request_with(WORD), offer=worker_pb2.HandoffOffer(handoff_id="h"))
            await router.send(abort=worker_pb2.Abort(handle=1))
            await router.submit(1, make_request([1, 2], 3), offer=worker_pb2.HandoffOffer(handoff_id="i"))
            failed = (await router.read("failed")).failed
            assert (failed.handle, failed.error) == (1, "InvalidRequest") and "in use" in failed.message
        finally:
            may_go_on.set()
        state = await router.idle_state()
        assert (state.num_open_handoffs, state.load.num_free_blocks) == (0, state.load.num_blocks)
        await router.submit(2, make_request([1, 2], 3))
        assert len(await router.tokens(2)) == 3
