"""Counts the tokens of a thought, and says when its budget is spent.

    no thought yet  -- begin_id -->  thinking  -- end_id, by the model or because the budget is spent -->  over

An answer has one thought; what looks like another after it is text.
"""

from ..common.request import ThoughtBudget


class ThoughtCount:
    def __init__(self, budget: ThoughtBudget) -> None:
        self._budget = budget
        self._left = budget.num_tokens if budget.is_open else None  # None: no thought yet
        self.is_over = False

    def consume(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            if self.is_over:
                return
            if self._left is None:
                self._left = self._budget.num_tokens if token_id == self._budget.begin_id else None
            elif token_id == self._budget.end_id:
                self.is_over = True
            else:
                self._left -= 1

    @property
    def forced(self) -> int | None:
        """The token that must follow; None: any may."""
        is_spent = not self.is_over and self._left is not None and self._left <= 0
        return self._budget.end_id if is_spent else None
