import pytest

from diptych.workers.common.request import ThoughtBudget
from diptych.workers.grammar.thought import ThoughtCount

BEGIN, END = 1, 2
BUDGET = ThoughtBudget(3, BEGIN, END)
OPEN = ThoughtBudget(3, BEGIN, END, is_open=True)


@pytest.mark.parametrize(
    ("budget", "token_ids", "forced"),
    [
        (BUDGET, [7, 7, 7, 7], None),  # no thought
        (BUDGET, [7, BEGIN, 7, 7], None),
        (BUDGET, [7, BEGIN, 7, 7, 7], END),
        (BUDGET, [BEGIN, 7, 7, 7, END], None),
        (BUDGET, [BEGIN, 7, END, 7, 7, 7], None),  # ended by itself
        (BUDGET, [BEGIN, 7, END, BEGIN, 7, 7, 7], None),  # an answer has one thought
        (OPEN, [], None),
        (OPEN, [7, 7, 7], END),
        (OPEN, [BEGIN, 7, 7], END),  # a mark that is repeated counts
        (OPEN, [7, 7, 7, END], None),
        (ThoughtBudget(0, BEGIN, END, is_open=True), [], END),
        (ThoughtBudget(0, BEGIN, END), [], None),
        (ThoughtBudget(0, BEGIN, END), [BEGIN], END),
    ],
)
def test_the_end_follows_when_the_budget_is_spent(budget: ThoughtBudget, token_ids: list[int], forced: int) -> None:
    whole, piecewise = ThoughtCount(budget), ThoughtCount(budget)
    whole.consume(token_ids)
    for token_id in token_ids:
        piecewise.consume([token_id])
    assert (whole.forced, piecewise.forced) == (forced, forced)
