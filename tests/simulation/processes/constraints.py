"""Grammars and budgets of thoughts of some requests in a seventh of the worlds. A generator of its own draws them, so
that all else in those worlds is as without.

The engine follows them by its shipped matchers and masks; the grammar is a fake, in which every token before decides
what may follow, in its order: a replay that leaves one out, or has one twice, gives another token. What is expected is
computed from the tokens alone, in checks/sampling.py.
"""

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diptych.workers.common.request import Grammar, GrammarKind, ThoughtBudget
from diptych.workers.grammar.compiler import CompiledGrammar

from ..checks.sampling import STRIDE, VOCAB_SIZE, digest_of, forced

if TYPE_CHECKING:
    from .clients import Client

EVERY, REST = 7, 1  # seeds with this rest
GRAMMAR = Grammar(GrammarKind.REGEX, "fake")


def constrain(clients: "list[Client]", seed: int) -> None:
    """Half of the requests follow the grammar, half have a budget."""
    if seed % EVERY != REST:
        return
    rng = random.Random(f"constraints of {seed}")
    for client in clients:
        grammar = GRAMMAR if rng.random() < 0.5 else None
        marks = rng.sample(range(1, VOCAB_SIZE), 2)
        thought = ThoughtBudget(rng.randint(0, 9), *marks, is_open=True) if rng.random() < 0.5 else None
        sampling = replace(client.request.sampling, grammar=grammar, thought=thought)
        client.request = replace(client.request, sampling=sampling)


class FakeState:
    """State of the grammar of one answer: stands for an LLMatcher."""

    def __init__(self, digest: int = 0) -> None:
        self.digest = digest

    def deep_copy(self) -> "FakeState":
        return FakeState(self.digest)

    def consume_tokens(self, token_ids: list[int]) -> bool:
        self.digest = digest_of(token_ids, self.digest)
        return True

    def consume_token(self, token_id: int) -> bool:
        return self.consume_tokens([token_id])

    def compute_ff_tokens(self) -> list[int]:
        found: list[int] = []
        digest = self.digest
        while (token_id := forced(digest)) is not None and len(found) < 9:
            found.append(token_id)
            digest = digest_of([token_id], digest)
        return found

    def is_stopped(self) -> bool:
        return False

    def fill(self, mask: NDArray[np.int32]) -> None:
        bits = np.zeros(len(mask) * 32, dtype=np.uint8)
        if (only := forced(self.digest)) is not None:
            bits[only] = 1
        else:
            bits[-self.digest % STRIDE : VOCAB_SIZE : STRIDE] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)


class FakeCompiler:
    """Stands for a worker's GrammarCompiler, which has compiled the grammar before."""

    def cached(self, grammar: Grammar) -> CompiledGrammar:
        assert grammar == GRAMMAR
        prototype: Any = FakeState()
        return CompiledGrammar(prototype)


def fill_masks(executor: object, states: list[tuple[FakeState, int]], masks: NDArray[np.int32]) -> None:
    """Stand for llguidance's function of this signature."""
    for state, row in states:
        state.fill(masks[row])
