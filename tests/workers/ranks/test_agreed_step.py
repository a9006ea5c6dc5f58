"""Sizes of steps that workers agree on."""

from hypothesis import given
from hypothesis import strategies as st

from diptych.workers.ranks.agreed_step import StepSize, agreed

SIZES = st.builds(StepSize, st.integers(0, 1 << 20), st.booleans())


@given(st.lists(SIZES, min_size=1))
def test_a_step_holds_every_batch(sizes: list[StepSize]) -> None:
    assert [StepSize.of_number(size.number) for size in sizes] == sizes
    step = agreed(size.number for size in sizes)
    assert step.num_rows == max(size.num_rows for size in sizes)
    assert step.has_prompts == any(size.has_prompts for size in sizes)


def test_no_batch_has_the_number_0() -> None:
    assert StepSize().number == 0 and StepSize.of_number(0) == StepSize()
