"""Roles of workers: presets of the prefill budget, the prompt tokens that a step may compute beside running decodes. No
torch.

    0 ─────── decode ─────────────── mixed ── step_tokens
    prompts in steps of their own    a time target    no time target: the prefill role
"""

from enum import Enum


class Role(Enum):
    """Use of a worker that its prefill budget amounts to; a pool is named after the one that its workers start with."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


def budget_of(role: Role, step_tokens: int, decode_tokens: int) -> int:
    """Return the prefill budget of a role. `step_tokens`: token budget of a step; `decode_tokens`: prompt tokens beside
    decodes that the settings give to the decode role."""
    if role is Role.PREFILL:
        return step_tokens
    most = max(step_tokens - 1, 0)  # of a step with one decode
    return most if role is Role.MIXED else min(decode_tokens, max(most - 1, 0))


def role_of(budget: int, step_tokens: int, decode_tokens: int) -> Role:
    """Return the role that a prefill budget amounts to."""
    if budget >= step_tokens:
        return Role.PREFILL
    if budget < step_tokens - 1 and budget <= budget_of(Role.DECODE, step_tokens, decode_tokens):
        return Role.DECODE
    return Role.MIXED
