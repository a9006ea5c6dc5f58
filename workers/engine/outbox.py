"""What an engine has to say: gathered while it works, told in the midst of a step or at its end."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from ..common.prompt_logprobs import PromptLogprobs
from ..core.prefix_cache import PrefixCache
from ..core.sequence import NEVER, Sequence
from .events import FailureEvent, HandoffEvent, PromptLogprobsEvents, StepOutput, StepTokens
from .load import EngineLoad

LOAD_INTERVAL_S = 0.1


class Outbox:
    """`prompt_logprobs`, `tokens`, `failures`, `handoffs`: StepOutput's, of what is not told yet."""

    def __init__(self, load: EngineLoad, cache: PrefixCache, clock: Callable[[], float]) -> None:
        self.prompt_logprobs = PromptLogprobsEvents()
        self.tokens = StepTokens()
        self.failures: list[FailureEvent] = []
        self.handoffs: list[HandoffEvent] = []
        self._load, self._cache, self._clock = load, cache, clock
        self._step = 0
        self._load_due = 0.0

    def add_prompt_logprobs(self, computed: SequenceOf[tuple[Sequence, PromptLogprobs]]) -> None:
        """They are due no more."""
        for sequence, found in computed:
            sequence.next_prompt_logprob = found.end if found.end < sequence.num_prompt else NEVER
            self.prompt_logprobs.append((sequence.key, found))

    def tell(self, events: SequenceOf[HandoffEvent], publish: Callable[[StepOutput], object] | None) -> None:
        """While a step runs: `events`, after those that wait to be told, and tokens that were kept back until now."""
        self.handoffs += events
        if publish is not None and (self.handoffs or self.tokens):
            publish(StepOutput(self._step, False, self.prompt_logprobs, self.tokens, handoffs=self.handoffs))
            self.prompt_logprobs, self.tokens, self.handoffs = PromptLogprobsEvents(), StepTokens(), []

    def take(self, *, ran: bool) -> StepOutput:
        """At a step's end. ran: a batch was computed."""
        output = StepOutput(self._step, ran, self.prompt_logprobs, self.tokens, self.failures, self.handoffs)
        now = self._clock()
        if now >= self._load_due or not ran:
            self._load_due = now + LOAD_INTERVAL_S
            output.load = self._load.report()
            # A busy worker fills a block every step or so: told each time, they would double the messages of a step.
            output.stored, output.removed = self._cache.take_events()
        self._step += 1
        self.prompt_logprobs = PromptLogprobsEvents()
        self.tokens, self.failures, self.handoffs = StepTokens(), [], []
        return output
