"""Grammars of the answers made here: who follows one, who cannot, and the tokens that it forces.

follow ──> masks of its tokens (sampling/grammar_masks.py) ──> take_failed: the answers that cannot follow theirs
                                                           └─> run_after: what must follow the token of a step
"""

from ..common.errors import InvalidGrammar
from ..core.sequence import SampledToken, Sequence
from ..grammar.compiler import CompiledGrammar
from ..grammar.matcher import Matcher


class FollowedGrammars:
    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids
        self._failed: list[tuple[Sequence, InvalidGrammar]] = []  # found by the step that is finished

    def follow(self, sequence: Sequence, grammar: CompiledGrammar | None) -> None:
        """Let a new sequence follow a grammar, the budget of its thought, both or neither. A grammar allows an
        end-of-sequence token where it may end, and nothing else where it must: so that always ends the sequence, also
        before min_tokens, which the masks see to."""

        def failed(error: InvalidGrammar) -> None:
            self._failed.append((sequence, error))

        budget = sequence.request.sampling.thought
        if grammar is None:
            sequence.matcher = None if budget is None else Matcher(None, failed, budget)
            return
        sequence.matcher = grammar.matcher(failed, budget)
        sequence.stop_ids |= set(self._eos_token_ids)
        sequence.min_end = 0

    def take_failed(self) -> dict[Sequence, InvalidGrammar]:
        """Return the sequences that cannot follow their grammar, once each."""
        if not self._failed:
            return {}
        failed, self._failed = dict(self._failed), []
        return failed

    def run_after(self, token: SampledToken) -> list[int]:
        """Return the tokens to be told with this one, which its sequence has already: the grammar allows no other. None
        for a sequence that is being handed off, because its seal wants all but one token computed: they follow there,
        one by one or together. Up to the one that ends it."""
        sequence = token.sequence
        assert sequence.matcher is not None
        run = sequence.matcher.take_run(token.token_id)
        sequence.run_length = 1
        if not run or sequence.handoff_id is not None or sequence.finish_reason is not None:
            return []
        run = run[: sequence.end - sequence.num_tokens]
        ends = (i for i, token_id in enumerate(run, sequence.num_tokens + 1) if sequence.ends_with(token_id, i))
        run = run[: next(ends, sequence.end) - sequence.num_tokens]
        sequence.run_length += len(run)
        return run
