"""Speculation of a simulated worker: the drafters that serve decide, and whether a token is accepted is drawn.

    Scheduler ─> SimulatedSpeculation.draft: Speculator or ModelSpeculator chooses lengths by costs and acceptance
    settle       draws what is accepted: each drafted token, if all before it are, with the set probability
    take_pass_s  time that a model drafted before the step

The rows of drafts cost what the StepTimer says of prompt tokens in a step with decodes, as an engine's step log has it.
A pass of a model that drafts takes a set share of the time of a step in which its sequences decode.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from ...workers.core.draft import Draft, ModelDrafts
from ...workers.core.draft_kv import DraftKV
from ...workers.core.drafting import Reserve
from ...workers.core.sequence import Batch, Sequence
from ...workers.costs.step_cost import StepWork
from ...workers.speculation.model_speculator import ModelSpeculator
from ...workers.speculation.speculator import Speculator
from ...workers.speculation.synthetic import uniform
from .timing import StepTimer


@dataclass(frozen=True, slots=True)
class SpeculationSetup:
    """`acceptance`: probability that a drafted token is accepted if those before it are; `pass_share`: of the time of a
    step that decodes, in which a model drafts a token of each sequence; None: no model drafts; `seed`: of what is
    accepted; `computes_prompts`: the model has KV of its own."""

    method: str
    acceptance: float
    max_tokens: int
    min_accept: float = 0.0
    pass_share: float | None = None
    computes_prompts: bool = False
    seed: int = 0


class SimulatedSpeculation:
    """A Drafter."""

    def __init__(self, setup: SpeculationSetup, timer: StepTimer) -> None:
        self._setup, self._timer = setup, timer
        self._model = None if setup.pass_share is None else _Model(setup.acceptance, setup.pass_share, timer)
        limits = setup.max_tokens, setup.min_accept
        if self._model is None:
            self._drafter = Speculator(setup.method, _Text(setup.acceptance), *limits)
        else:
            self._drafter = ModelSpeculator(setup.method, self._model, *limits)
        self.num_drafted = self.num_accepted = 0  # tokens

    @property
    def method(self) -> str:
        return self._setup.method

    def rests(self) -> bool:
        return self._drafter.rests()

    def draft(self, sequences: SequenceOf[Sequence], num_rows: int, room: int, reserve: Reserve) -> list[list[int]]:
        return self._drafter.draft(sequences, num_rows, room, reserve)

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self._drafter.verified(sequence, num_drafted, num_accepted)

    def measured(self, num_rows: int, seconds: float) -> None:
        self._drafter.measured(num_rows, seconds)

    def ended(self, sequence: Sequence) -> None:
        self._drafter.ended(sequence)

    def settle(self, batch: Batch) -> None:
        """Draw what the drafts of a step yield, of tokens that are all 0."""
        seed, acceptance = self._setup.seed, self._setup.acceptance
        for entry in batch.drafts:
            first, number = entry.sequence.num_tokens, entry.sequence.arrival
            num = 0
            while num < len(entry.draft) and uniform(seed, first + num, number) < acceptance:
                num += 1
            entry.yielded.extend([0] * (num + 1))

    def seconds_beside(self, work: StepWork) -> float:
        """Seconds by which a step takes longer, because the model computes its prompts, too."""
        if not (self._setup.computes_prompts and self._setup.pass_share and work.num_prefill):
            return 0.0
        decodes = StepWork(work.num_decodes, work.num_context)
        prompts_s = self._timer.seconds(work) - (self._timer.seconds(decodes) if work.num_decodes else 0.0)
        return self._setup.pass_share * prompts_s

    def take_pass_s(self) -> float:
        """Seconds of the passes since the last call."""
        return 0.0 if self._model is None else self._model.take_pass_s()


class _Text:
    """A Proposer that always finds a draft, and knows how good it is."""

    def __init__(self, acceptance: float) -> None:
        self._acceptance = acceptance

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft:
        return Draft([0] * max_tokens, [self._acceptance] * max_tokens)

    def ended(self, sequence: Sequence) -> None:
        """Do nothing: no state is kept."""


class _Model:
    """A ModelProposer whose passes take virtual time."""

    num_anew = 0

    def __init__(self, acceptance: float, pass_share: float, timer: StepTimer) -> None:
        self._acceptance, self._pass_share, self._timer = acceptance, pass_share, timer
        self._pass_s = 0.0

    def attach(self, kv: DraftKV | None) -> None:
        """Do nothing: KV of a draft is counted by no one here."""

    def may_draft(self, sequence: Sequence) -> bool:
        return True

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> ModelDrafts:
        pass_s: list[float] = []
        for number in range(max(depth for _, depth in wanted)):
            drafting = [sequence.num_tokens for sequence, depth in wanted if depth > number]
            pass_s.append(self._pass_share * self._timer.seconds(StepWork(len(drafting), sum(drafting))))
        self._pass_s += sum(pass_s)
        return ModelDrafts([Draft([0] * depth, [self._acceptance] * depth) for _, depth in wanted], pass_s)

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        """Do nothing: no state is kept."""

    def ended(self, sequence: Sequence) -> None:
        """Do nothing: no state is kept."""

    def take_pass_s(self) -> float:
        seconds, self._pass_s = self._pass_s, 0.0
        return seconds
