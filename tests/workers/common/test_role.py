"""Roles as presets of the prefill budget."""

import pytest

from diptych.workers.common.role import Role, budget_of, role_of


@pytest.mark.parametrize("decode_tokens", [1, 256, 5000])
@pytest.mark.parametrize("step_tokens", [2, 16, 257, 2048])
def test_each_role_is_known_by_its_budget(step_tokens: int, decode_tokens: int) -> None:
    for role in Role:
        assert role_of(budget_of(role, step_tokens, decode_tokens), step_tokens, decode_tokens) is role


def test_budgets_between_the_presets_are_mixed() -> None:
    roles = [role_of(budget, 2048, 256) for budget in (0, 16, 256, 257, 2046, 2047, 2048, 9999)]
    assert roles == [Role.DECODE] * 3 + [Role.MIXED] * 3 + [Role.PREFILL] * 2
