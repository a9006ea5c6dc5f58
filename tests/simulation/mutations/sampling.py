"""Bugs to plant in a request's data other than its tokens, between processes: see mutations.py."""

from dataclasses import replace
from typing import Any

from diptych.cluster.routing import submit_message
from diptych.workers.common.request import Request
from diptych.workers.core import prefix_cache
from diptych.workers.core.sequence import Provisional
from diptych.workers.grammar.matcher import Matcher

from .mutations import Replacement


def a_resumed_request_has_another_seed() -> list[Replacement]:
    def changed(request: Request, outputs: list[int]) -> tuple[Request, list[int]]:
        sampling = replace(request.sampling, seed=request.sampling.seed + len(outputs))
        return replace(request, sampling=sampling), outputs

    return _submitted(changed)


def outputs_are_sent_as_prompt() -> list[Replacement]:
    def changed(request: Request, outputs: list[int]) -> tuple[Request, list[int]]:
        num_left = request.sampling.max_tokens - len(outputs)
        sampling = replace(request.sampling, max_tokens=num_left, min_tokens=min(request.sampling.min_tokens, num_left))
        return replace(request, prompt_token_ids=(*request.prompt_token_ids, *outputs), sampling=sampling), []

    return _submitted(changed)


def penalties_stay_at_the_router() -> list[Replacement]:
    def changed(request: Request, outputs: list[int]) -> tuple[Request, list[int]]:
        return replace(request, sampling=replace(request.sampling, presence_penalty=0.0)), outputs

    return _submitted(changed)


def grammars_stay_at_the_router() -> list[Replacement]:
    def changed(request: Request, outputs: list[int]) -> tuple[Request, list[int]]:
        return replace(request, sampling=replace(request.sampling, grammar=None)), outputs

    return _submitted(changed)


def a_thought_has_its_budget_again_after_a_resumption() -> list[Replacement]:
    def changed(request: Request, outputs: list[int]) -> tuple[Request, list[int]]:
        thought = request.sampling.thought
        if thought is not None:
            thought = replace(thought, num_tokens=thought.num_tokens + len(outputs))
        return replace(request, sampling=replace(request.sampling, thought=thought)), outputs

    return _submitted(changed)


def a_grammar_begins_at_the_last_token() -> list[Replacement]:
    real = Matcher.new_tokens
    return [(Matcher, "new_tokens", lambda self, ids, num_prompt: real(self, ids, num_prompt)[-1:])]


def a_replay_is_consumed_twice() -> list[Replacement]:
    real = Matcher.consume
    return [(Matcher, "consume", lambda self, ids: real(self, ids * (1 + (len(ids) > 1))))]


def tenants_share_blocks() -> list[Replacement]:
    real = prefix_cache._extend
    return [(prefix_cache, "_extend", lambda hashes, tokens, size, salt: real(hashes, tokens, size, b""))]


def a_provisional_token_loses_its_logprob() -> list[Replacement]:
    real = Provisional.keep
    return [(Provisional, "keep", lambda self, token, now: real(self, replace(token, logprob=None), now))]


def _submitted(changed: Any) -> list[Replacement]:
    real = submit_message.submit_from_request
    return [(submit_message, "submit_from_request", lambda handle, *args: real(handle, *changed(*args)))]


SAMPLING = (
    a_resumed_request_has_another_seed,
    outputs_are_sent_as_prompt,
    penalties_stay_at_the_router,
    grammars_stay_at_the_router,
    a_thought_has_its_budget_again_after_a_resumption,
    a_grammar_begins_at_the_last_token,
    a_replay_is_consumed_twice,
    tenants_share_blocks,
    a_provisional_token_loses_its_logprob,
)
