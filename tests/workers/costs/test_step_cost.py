"""What a step takes is learnt from steps, and bounds the next one."""

import random

import pytest

from diptych.workers.costs.step_cost import StepCost, StepWork


def true_seconds(work: StepWork) -> float:
    return 2e-3 + 5e-5 * work.num_decodes + 1e-7 * work.num_context + 3e-5 * work.num_prefill + 1e-9 * work.num_pairs


def some_work(rng: random.Random) -> StepWork:
    work = StepWork(num := rng.randint(0, 32), num * rng.randint(50, 900))
    return work.with_chunk(rng.randint(0, 500), rng.randint(1, 512)) if rng.random() < 0.6 or not num else work


def learnt(num_steps: int = 600, noise: float = 0.05) -> StepCost:
    rng, cost = random.Random(1), StepCost()
    for _ in range(num_steps):
        work = some_work(rng)
        cost.add(work, true_seconds(work) * rng.uniform(1 - noise, 1 + noise))
    return cost


def test_nothing_is_said_before_steps_of_both_kinds_were_seen() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.add(StepWork(4, 400), 0.01)
    assert not cost.is_measured
    for _ in range(2):
        cost.add(StepWork(4, 400).with_chunk(0, 64), 0.02)
    assert cost.is_measured


def test_predicts_steps_that_it_has_not_seen() -> None:
    cost, rng = learnt(), random.Random(2)
    for _ in range(50):
        work = some_work(rng)
        assert cost.seconds(work) == pytest.approx(true_seconds(work), rel=0.25)


def test_as_many_tokens_fit_as_the_time_allows() -> None:
    cost = learnt()
    work = StepWork(16, 4000)
    for start in (0, 300):
        num = cost.prefill_tokens(work, start, 0.012)
        assert num > 16
        assert cost.seconds(work.with_chunk(start, num)) <= 0.012 < cost.seconds(work.with_chunk(start, num + 2))
    assert cost.prefill_tokens(work, 0, 1e-3) == 0


def test_steps_that_are_all_alike_for_long_spoil_nothing_and_a_hiccup_little() -> None:
    cost = learnt()
    alike = StepWork(16, 4000)
    for _ in range(3000):
        cost.add(alike, true_seconds(alike))
    cost.add(alike, 5.0)
    cost.add(alike, float("nan"))
    cost.add(alike, -1.0)
    for work in (alike, alike.with_chunk(0, 256)):
        assert cost.seconds(work) == pytest.approx(true_seconds(work), rel=0.3)


def test_steps_on_borrowed_cores_count_only_until_enough_are_known() -> None:
    """Else a step would be planned for cores that are gone when it runs."""
    rng, cost, known = random.Random(1), StepCost(), learnt(noise=0.0)
    for _ in range(40):
        work = some_work(rng)
        cost.add(work, true_seconds(work) / 2, borrowed=True)
        known.add(work, true_seconds(work) / 2, borrowed=True)
    assert cost.is_measured and cost.decode_is_measured
    work = StepWork(8, 4000).with_chunk(0, 256)
    assert known.seconds(work) == pytest.approx(true_seconds(work), rel=0.01)


def test_follows_a_machine_that_becomes_slower() -> None:
    cost, rng = learnt(), random.Random(3)
    for _ in range(1500):
        work = some_work(rng)
        cost.add(work, 2 * true_seconds(work))
    work = StepWork(16, 4000).with_chunk(0, 200)
    assert cost.seconds(work) == pytest.approx(2 * true_seconds(work), rel=0.25)
