"""Sizes of steps that workers agree on."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from diptych.workers.ranks.agreed_step import PassesSize, StepSize, agreed, size_of

MOST = (1 << 20) - 1
SIZES = st.builds(StepSize, st.integers(0, MOST), st.booleans())
DRAFTS = st.builds(PassesSize, st.integers(1, MOST), st.integers(1, MOST), st.integers(1, 16))


@given(st.lists(SIZES, min_size=1))
def test_a_step_holds_every_batch(sizes: list[StepSize]) -> None:
    assert [size_of(size.number) for size in sizes] == sizes
    step = agreed(size.number for size in sizes)
    assert isinstance(step, StepSize)
    assert step.num_rows == max(size.num_rows for size in sizes)
    assert step.has_prompts == any(size.has_prompts for size in sizes)


@given(st.lists(SIZES), st.lists(DRAFTS, min_size=1), st.randoms())
def test_drafts_come_first_and_all_fit(batches: list[StepSize], drafts: list[PassesSize], shuffled: Random) -> None:
    assert [size_of(size.number) for size in drafts] == drafts
    assert all(0 < size.number < 1 << 63 for size in drafts)
    numbers = [size.number for size in [*batches, *drafts]]
    shuffled.shuffle(numbers)
    most = (max(getattr(of, name) for of in drafts) for name in ("num_rows", "num_sequences", "num_passes"))
    assert agreed(numbers) == PassesSize(*most)


def test_no_batch_has_the_number_0() -> None:
    assert StepSize().number == 0 and size_of(0) == StepSize()
