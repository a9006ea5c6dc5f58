"""The events of an engine that were not sent yet: sent while a step runs or at its end."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from ..common.prompt_logprobs import PromptLogprobs
from ..core.prefix_cache import PrefixCache
from ..core.sequence import NEVER, Sequence
from ..handoff.types import HandoffEvent
from .events import EmbeddingEvents, FailureEvent, PromptLogprobsEvents, StepOutput, StepTokens
from .load import EngineLoad
from .outgoing import OutgoingHandoffs

LOAD_INTERVAL_S = 0.1


class Outbox:
    """`prompt_logprobs`, `tokens`, `embeddings`, `failures`: of the next StepOutput, which takes the events of
    `outgoing` too."""

    def __init__(
        self, load: EngineLoad, cache: PrefixCache, outgoing: OutgoingHandoffs, clock: Callable[[], float]
    ) -> None:
        self.prompt_logprobs = PromptLogprobsEvents()
        self.tokens = StepTokens()
        self.embeddings = EmbeddingEvents()
        self.failures: list[FailureEvent] = []
        self._load, self._cache, self._outgoing, self._clock = load, cache, outgoing, clock
        self._step = 0
        self._load_due = 0.0

    def add_prompt_logprobs(self, computed: SequenceOf[tuple[Sequence, PromptLogprobs]]) -> None:
        """Add what a step computed; it is due no more."""
        for sequence, found in computed:
            sequence.next_prompt_logprob = found.end if found.end < sequence.num_prompt else NEVER
            self.prompt_logprobs.append((sequence.key, found))

    def tell(self, publish: Callable[[StepOutput], object] | None) -> None:
        """While a step runs: send the hand-offs' events, and tokens that were kept back until now."""
        if publish is not None and (self._outgoing.events or self.tokens):
            output = StepOutput(self._step, False, self.prompt_logprobs, self.tokens, handoffs=self._take_handoffs())
            if output.tokens.has_finish:
                output.stored, output.removed = self._cache.take_events()
            publish(output)
            self.prompt_logprobs, self.tokens = PromptLogprobsEvents(), StepTokens()

    def take(self, *, ran: bool) -> StepOutput:
        """Everything since the last call, at a step's end. ran: a batch was computed."""
        output = StepOutput(
            self._step,
            ran,
            self.prompt_logprobs,
            self.tokens,
            self.embeddings,
            self.failures,
            self._take_handoffs(),
        )
        now = self._clock()
        is_due = now >= self._load_due or not ran
        if is_due:
            self._load_due = now + LOAD_INTERVAL_S
            output.load = self._load.report()
        # A busy worker fills a block in almost every step: separate reports would double the messages of a step. A
        # request that follows an answer at once shall find its blocks.
        if is_due or output.tokens.has_finish or output.embeddings:
            output.stored, output.removed = self._cache.take_events()
        self._step += 1
        self.prompt_logprobs = PromptLogprobsEvents()
        self.tokens, self.embeddings, self.failures = StepTokens(), EmbeddingEvents(), []
        return output

    def _take_handoffs(self) -> list[HandoffEvent]:
        events, self._outgoing.events = self._outgoing.events, []
        return events
