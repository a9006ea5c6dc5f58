"""Bugs to plant where a grammar forces several tokens at once: see mutations.py."""

from typing import Any

from diptych.workers.core.sequence import Sequence
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.followed_grammars import FollowedGrammars
from diptych.workers.grammar.matcher import Matcher

from .mutations import Replacement


def a_run_passes_the_last_token_that_was_asked_for() -> list[Replacement]:
    def run_after(self: FollowedGrammars, token: Any) -> list[int]:
        matcher: Matcher = token.sequence.matcher
        run = [] if token.sequence.handoff_id is not None else matcher.take_run(token.token_id)
        token.sequence.run_length = 1 + len(run)
        return run

    return [(FollowedGrammars, "run_after", run_after)]


def a_run_passes_a_stop() -> list[Replacement]:
    real = Sequence.ends_with

    def ends_with(self: Sequence, token_id: int, num_tokens: int) -> bool:
        return num_tokens == len(self.token_ids) and real(self, token_id, num_tokens)

    return [(Sequence, "ends_with", ends_with)]


def only_the_last_token_of_a_run_is_computed() -> list[Replacement]:
    real = Engine._forward

    def forward(self: Engine, token: Any, run: list[int]) -> None:
        real(self, token, run)
        token.sequence.num_computed += len(run)

    return [(Engine, "_forward", forward)]


def a_run_is_known_here_and_not_told() -> list[Replacement]:
    def forward(self: Engine, token: Any, run: list[int]) -> None:
        if token.sequence.clock is not None:
            self._note(token)
        token.sequence.token_ids += run
        self.scheduler.forward(token.sequence)

    return [(Engine, "_forward", forward)]


FORCED = (
    a_run_passes_the_last_token_that_was_asked_for,
    a_run_passes_a_stop,
    only_the_last_token_of_a_run_is_computed,
    a_run_is_known_here_and_not_told,
)
