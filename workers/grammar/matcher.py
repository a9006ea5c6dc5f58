"""Matches one answer with its grammar, the budget of its thought, or both: they decide which tokens may follow. The
state is a function of the answer's tokens alone.

    new_tokens (engine)  ->  consume  ->  mask of the tokens that may follow  ->  check   (sampling/grammar_masks.py)
                                                                                  find_run  ->  take_run (engine)

Where the grammar forces the next bytes, their tokens are a run: one step yields them all.

So nothing of it travels with a hand-off, a resumption or a migration: the tokens do, and the first `consume` replays
them.
"""

import time
from collections.abc import Callable
from copy import copy

from llguidance import LLMatcher

from ..common.errors import InvalidGrammar
from ..common.request import ThoughtBudget
from .thought import ThoughtCount

MAX_RUN = 64  # tokens
MAX_RUN_S = 0.002  # to find them, about 6 us each: others of the step wait
Failed = Callable[[InvalidGrammar], object]


class Matcher:
    def __init__(self, state: LLMatcher | None, failed: Failed, budget: ThoughtBudget | None = None) -> None:
        """state: of an answer without tokens; None: it follows no grammar. failed: called once, on the thread that uses
        the matcher, if the answer cannot follow the grammar."""
        self.state = state
        self._thought = ThoughtCount(budget) if budget is not None else None
        self._failed: Failed | None = failed
        self._num_given = 0
        self._run: list[int] = []  # that must follow the tokens consumed, if it is more than one

    def new_tokens(self, token_ids: list[int], num_prompt: int) -> list[int]:
        """Return the tokens of the answer that were not returned before: they are to be consumed, in this order.
        token_ids: of prompt and answer."""
        new = token_ids[num_prompt + self._num_given :]
        self._num_given += len(new)
        return new

    def consume(self, token_ids: list[int]) -> None:
        self._run = []
        if token_ids and self.state is not None:
            self.state.consume_tokens(token_ids)
        if self._thought is not None:
            self._thought.consume(token_ids)

    @classmethod
    def free(cls) -> "Matcher":
        """Return a matcher of an answer that has left: any token may follow."""
        return cls(None, _forget)

    @property
    def has_run(self) -> bool:
        """Return whether the next token brings others with it (`take_run`): the step after it is not of one token."""
        return len(self._run) > 1

    @property
    def forced(self) -> int | None:
        """The only token that may follow if the grammar allows it; None: there is none."""
        return None if self._thought is None else self._thought.forced

    def find_run(self) -> None:
        """Find the tokens that must follow: each is all that the mask after the one before it would allow. So an answer
        is the same wherever it goes on without the rest of a run. It costs what those masks would have cost."""
        if self.state is None or (self._thought is not None and not self._thought.is_over):
            return
        until, forced = time.monotonic() + MAX_RUN_S, self.state.compute_ff_tokens()
        if len(forced) > 1:
            ahead = self.state.deep_copy()
            while forced and len(self._run) < MAX_RUN and ahead.consume_token(forced[0]):
                if time.monotonic() > until:
                    break
                self._run.append(forced[0])
                forced = ahead.compute_ff_tokens()

    def after(self, token_id: int) -> "Matcher":
        """Return the matcher of the answer as it is if `token_id` follows. This one is left as it is. What the grammar
        does not allow makes one whose mask may not be used."""
        state = None if self.state is None else self.state.deep_copy()
        copied = Matcher(state, _forget)
        copied._thought = copy(self._thought)
        copied.consume([token_id])
        return copied

    def take_run(self, token_id: int) -> list[int]:
        """Return what must follow `token_id`, which itself follows the tokens consumed. Once."""
        run, self._run = self._run, []
        return run[1:] if run and run[0] == token_id else []

    def check(self) -> bool:
        """Return whether the mask may be used; False: the answer has ended with an error."""
        if self._failed is not None and (why := self._failure()) is not None:
            failed, self._failed = self._failed, None
            failed(InvalidGrammar(why, param="grammar"))
        return self._failed is not None

    def _failure(self) -> str | None:
        if self.state is None:
            return None
        if not self.state.is_stopped() or (self.state.is_accepting() and not self.state.is_error()):
            return None
        if self.state.is_error():
            why = self.state.get_error().strip().partition("\n")[0]
        else:
            why = "no token of the model may follow"
        return f"the answer cannot follow its grammar after {self._num_given} tokens: {why[:500]}"


def _forget(_error: InvalidGrammar) -> None:
    """Do nothing: no answer fails for a token that may never follow."""
