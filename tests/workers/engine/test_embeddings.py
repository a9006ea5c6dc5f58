"""Embeddings of an engine: pooled from the KV of all tokens, however the prompt is cut, cached and preempted."""

from dataclasses import replace

import numpy as np
import pytest

from diptych.workers.common.errors import EmbeddingsNotServed, InvalidRequest
from diptych.workers.common.request import Request
from diptych.workers.core.embedding import Embedding, EmbeddingSpec, Pooling
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.testing.fake_runner import FakeRunner, fake_hidden, fake_output

from ...support.engines import HANDOFF, Clock, Move, assert_clean, make, run, tokens
from ...support.sequences import make_request

PROMPT = [7 * i % 19 + 1 for i in range(22)]  # five full blocks of four, and two tokens


def embedding_of(prompt: list[int]) -> Request:
    return replace(make_request(prompt, 1), embeds=True)


def expected(prompt: list[int], pooling: Pooling) -> np.ndarray:
    states = np.array([fake_hidden(prompt[: i + 1]) for i in range(len(prompt))])
    pooled = states[-1] if pooling is Pooling.LAST else states.mean(axis=0)
    return pooled / np.linalg.norm(pooled)


def found(outputs: list[StepOutput], key: str = "0/0") -> Embedding:
    """Return the one embedding of that key, for which no token was made."""
    [one] = [embedding for output in outputs for k, embedding in output.embeddings if k == key]
    assert not tokens(outputs, key)
    return one


def make_pooling(pooling: Pooling, num_blocks: int = 64, **config: int) -> Engine:
    return Engine(FakeRunner(num_blocks=num_blocks, pooling=pooling), SchedulerConfig(**config), clock=Clock())


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("chunk_tokens", [0, 1, 3, 8])
def test_an_embedding_is_pooled_once_cold_and_with_a_warm_cache(pooling: Pooling, chunk_tokens: int) -> None:
    engine = make_pooling(pooling, chunk_tokens=chunk_tokens)
    for key in ("0/0", "0/1"):
        engine.submit(key, embedding_of(PROMPT), [])
        one = found(run(engine), key)
        np.testing.assert_allclose(one.vector, expected(PROMPT, pooling), atol=1e-6)
        assert one.num_cached == (20 if pooling is Pooling.LAST and key == "0/1" else 0)
        assert one.num_stored == (20 if key == "0/0" else 0)
        assert one.timings is not None
    engine.submit("0/2", make_request(PROMPT, 9), [])
    outputs = run(engine)
    assert tokens(outputs, "0/2")[0].num_cached == 20, "its blocks are cached for whoever has the same prompt"
    assert [t.token_id for t in tokens(outputs, "0/2")] == fake_output(PROMPT, 9)
    assert_clean(engine)


@pytest.mark.parametrize("pooling", Pooling)
def test_embeddings_run_beside_answers(pooling: Pooling) -> None:
    runner = FakeRunner(num_blocks=64, pooling=pooling, looks_ahead=True)
    engine = Engine(runner, SchedulerConfig(max_batch_tokens=10), clock=Clock())
    prompts = {f"0/{i}": PROMPT[i : 12 + 2 * i] for i in range(5)}
    engine.submit("1/0", make_request(PROMPT, 20, ignore_eos=True), [])
    outputs = [engine.step()]
    for key, prompt in prompts.items():
        engine.submit(key, embedding_of(prompt), [])
    outputs += run(engine)
    for key, prompt in prompts.items():
        np.testing.assert_allclose(found(outputs, key).vector, expected(prompt, pooling), atol=1e-6)
    assert len(tokens(outputs, "1/0")) == 20
    assert_clean(engine)


@pytest.mark.parametrize("pooling", Pooling)
def test_a_preempted_prompt_is_pooled_anew(pooling: Pooling) -> None:
    """A short prompt's output takes the blocks of a long one that is computed a token a step."""
    engine = make_pooling(pooling, num_blocks=8, chunk_tokens=1)
    engine.submit("1/0", make_request(PROMPT[:4], 20, ignore_eos=True), [])
    engine.submit("0/0", embedding_of(PROMPT), [])
    outputs = run(engine)
    assert engine.scheduler.num_preemptions == 1
    np.testing.assert_allclose(found(outputs).vector, expected(PROMPT, pooling), atol=1e-6)
    assert_clean(engine)


def test_equal_prompts_are_computed_once() -> None:
    engine = make(chunk_tokens=5)
    for i in range(4):
        engine.submit(f"0/{i}", embedding_of([*PROMPT, 5]), [])
    outputs = run(engine)
    for i in range(4):
        np.testing.assert_allclose(found(outputs, f"0/{i}").vector, expected([*PROMPT, 5], Pooling.LAST), atol=1e-6)
    assert engine.check_integrity().load.num_prefill_tokens == len(PROMPT) + 1 + 3
    assert_clean(engine)


def test_a_prompt_may_fill_the_context() -> None:
    engine = Engine(FakeRunner(max_context=22), SchedulerConfig(), clock=Clock())
    engine.submit("0/0", embedding_of(PROMPT), [])
    engine.submit("0/1", embedding_of([*PROMPT, 1]), [])
    outputs = run(engine)
    np.testing.assert_allclose(found(outputs).vector, expected(PROMPT, Pooling.LAST), atol=1e-6)
    [failure] = [failure for output in outputs for failure in output.failures]
    assert (failure.key, failure.error.code) == ("0/1", "context_length_exceeded")
    assert_clean(engine)


@pytest.mark.parametrize("pooling", Pooling)
def test_a_prefix_is_pulled_where_it_spares_tokens(pooling: Pooling) -> None:
    source, sink = make(), make_pooling(pooling)
    source.submit("9/9", make_request(PROMPT, 1), [])
    run(source)
    source.outgoing.offer_prefix(HANDOFF, PROMPT, b"")
    move = Move(source, sink)
    move.hear([source.step()])
    sink.submit("0/1", embedding_of(PROMPT), [], prefix=True)
    outputs = [sink.step()]
    if pooling is Pooling.LAST:
        assert not outputs[0].embeddings
        move.commit()
    outputs += run(sink)
    one = found(outputs, "0/1")
    np.testing.assert_allclose(one.vector, expected(PROMPT, pooling), atol=1e-6)
    assert one.num_cached == (20 if pooling is Pooling.LAST else 0)
    assert_clean(sink)


def test_an_aborted_prompt_leaves_nothing() -> None:
    engine = make_pooling(Pooling.MEAN, chunk_tokens=4)
    engine.submit("0/0", embedding_of(PROMPT), [])
    outputs = [engine.step()]
    engine.abort("0/0")
    outputs += run(engine)
    assert not any(output.embeddings or output.failures for output in outputs)
    assert_clean(engine)


def refused(engine: Engine, request: Request, outputs: list[int] | None = None, **how: object) -> InvalidRequest:
    engine.submit("0/0", request, outputs or [], **how)  # type: ignore[arg-type]
    [failure] = engine.step().failures
    assert isinstance(failure.error, InvalidRequest)
    assert_clean(engine)
    return failure.error


def test_what_cannot_be_embedded_is_refused_by_name() -> None:
    runner = FakeRunner()
    runner.info = replace(runner.info, embedding=EmbeddingSpec(4, refusal="it pools by the first token"))
    engine = Engine(runner, SchedulerConfig(), clock=Clock())
    error = refused(engine, embedding_of(PROMPT))
    assert isinstance(error, EmbeddingsNotServed) and "it pools by the first token" in error.message
    runner.info = replace(runner.info, embedding=None)
    error = refused(Engine(runner, SchedulerConfig(), clock=Clock()), embedding_of(PROMPT))
    assert error.code == "embeddings_not_served"
    for how in ({"importing": True}, {"handoff_id": "handoff-1"}):
        assert "hand-off" in refused(make(), embedding_of(PROMPT), **how).message
    assert "without tokens" in refused(make(), replace(embedding_of(PROMPT), is_prefix=True)).message
    assert "without tokens" in refused(make(), embedding_of(PROMPT), [5]).message
