"""Settings of the scheduler."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..common.role import Role, budget_of, role_of
from ..common.settings import STRICT, Scope

LEAST_PREFILL_TOKENS = 16  # per step, even if decodes alone take longer than the target: prompts must progress
STEP_TOKENS = 2048  # budget of a step where neither settings nor a device give one


@dataclass(frozen=True, slots=True, config=STRICT)
class SchedulerConfig:
    max_batch_tokens: Annotated[int, Field(ge=0, description="A step's token budget; 0: by device.")] = 0
    chunk_tokens: Annotated[int, Field(ge=0, description="Longest prefill chunk; 0: no limit.")] = 0
    max_running: Annotated[int, Field(ge=1, description="Sequences in one batch.")] = 256
    target_step_s: Annotated[
        float | None,
        Field(ge=0, description="Seconds of a step with running decodes; 0: no matter.  [default: by load]"),
    ] = None
    tpot_s: Annotated[
        float | None,
        Scope.PROCESS,
        Field(ge=0, description="Promised time per output token, at which such a step aims.  [default: none]"),
    ] = None
    ttft_s: Annotated[
        float, Scope.PROCESS, Field(ge=0, description="Time to first token that the order of admission aims at.")
    ] = 1.0
    decode_role_prefill_tokens: Annotated[
        int,
        Scope.PROCESS,
        Field(ge=1, description="Prompt tokens of a step beside running decodes, in the decode role."),
    ] = 256

    @property
    def step_tokens(self) -> int:
        """Token budget of a step."""
        return self.max_batch_tokens or STEP_TOKENS

    def budget_of(self, role: Role) -> int:
        """Prefill budget of a role, in tokens."""
        return budget_of(role, self.step_tokens, self.decode_role_prefill_tokens)

    def role_of(self, budget: int) -> Role:
        """Role that a prefill budget amounts to."""
        return role_of(budget, self.step_tokens, self.decode_role_prefill_tokens)
