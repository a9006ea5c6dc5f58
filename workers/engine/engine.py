"""The engine: schedule -> run -> postprocess, one step at a time, on one thread.

It owns every Sequence of the worker and all block bookkeeping. It knows no socket and no event loop: commands come in
as method calls (engine/thread.py makes them from other threads), events go out in a StepOutput. KV is moved by
handoff/source.py, which gets the events of `outgoing` and calls `caught_up` and `end_lease`, and by handoff/sink.py,
which calls `begin`, `commit` and `fail_import` here, `reserve` and `settle` of `incoming`.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial

from ...proto import worker_pb2
from ..common.errors import (
    DiptychError,
    HandoffError,
    InternalError,
    InvalidRequest,
    LeaseLost,
    OutOfDeviceMemory,
    PromptReturned,
    RequestAborted,
)
from ..common.request import Request
from ..common.timings import PullTimes, SequenceClock, SequenceTimings
from ..core.block_manager import BlockManager
from ..core.draft import draft_kv_of
from ..core.drafting import Drafter
from ..core.prefix_cache import PrefixCache
from ..core.runner import Runner
from ..core.scheduler import Scheduler
from ..core.scheduler_config import SchedulerConfig
from ..core.sequence import NEVER, Batch, DraftEntry, Provisional, SampledToken, Sequence, SequenceStatus
from ..grammar.compiler import CompiledGrammar
from ..handoff.types import Seal
from .deadlines import Deadlines
from .embeddings import Embeddings, Pooled
from .events import FailureEvent, StepOutput, TokenNote
from .followed_grammars import FollowedGrammars
from .incoming import IncomingHandoffs
from .load import EngineLoad
from .outbox import Outbox
from .outgoing import ID_IN_USE, OutgoingHandoffs, check_prefix
from .self_test import compute_two_tokens
from .step_pipeline import StepPipeline


class Engine:
    """`clock` gives monotonic seconds; `layer_groups` is the `num_groups` of `outgoing`. Called on one thread."""

    def __init__(
        self,
        runner: Runner,
        config: SchedulerConfig,
        *,
        prefix_cache: bool = True,
        layer_groups: int = 0,
        clock: Callable[[], float] = time.monotonic,
        drafter: Drafter | None = None,
    ) -> None:
        self._runner, self._clock = runner, clock
        self.manager = BlockManager(runner.memory.num_blocks, runner.memory.on_first_use)
        layout, manager = runner.layout, self.manager
        self.cache = PrefixCache(manager, layout.block_size, enabled=prefix_cache, whole_blocks=layout.has_tail)
        self.draft_kv = draft_kv_of(layout, runner.proposer, self.manager, self.cache)
        self.scheduler = Scheduler(config, self.manager, self.cache, drafter, self.draft_kv)
        self._embeddings = Embeddings(runner.info.embedding)
        self._sequences: dict[str, Sequence] = {}
        held = manager, self.cache, self._sequences
        self.outgoing = OutgoingHandoffs(*held, layout, clock, self.draft_kv, num_groups=layer_groups)
        self.incoming = IncomingHandoffs(self.manager, self.cache, self.scheduler, self.draft_kv)
        self._deadlines = Deadlines()
        self._grammars = FollowedGrammars(runner.info.eos_token_ids)
        self._num_submitted = 0
        self._load = EngineLoad(runner, self.manager, self.scheduler, self.outgoing, self.incoming, clock)
        self.steps = StepPipeline(runner, self.scheduler, self.manager, self.outgoing, self._load, clock)
        self._output = Outbox(self._load, self.cache, self.outgoing, clock)

    def submit(
        self,
        key: str,
        request: Request,
        output_token_ids: list[int],
        *,
        handoff_id: str | None = None,
        importing: bool = False,
        prefix: bool = False,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Take a request. `handoff_id`: be the source; `importing`: be the sink, and wait for `reserve` and `commit`;
        `prefix`: so too, for the KV of its leading tokens alone; `grammar`: that of the request, if it has one. A bad
        request becomes a FailureEvent, never an exception: the peer's mistake is not the engine's."""
        try:
            info = self._runner.info
            request.validate(info.vocab_size, info.max_context_tokens, output_token_ids)
            if handoff_id is not None and self.outgoing.is_open(handoff_id):
                raise InvalidRequest(ID_IN_USE)
            if request.is_prefix:
                check_prefix(request, self.cache.block_size, None if importing or output_token_ids else handoff_id)
            self._embeddings.check(request, is_plain=handoff_id is None and not importing and grammar is None)
        except InvalidRequest as error:
            self._output.failures.append(FailureEvent(key, error))
            if handoff_id is not None:
                self.outgoing.refuse(handoff_id, error)
            return
        now = self._clock() if request.received_at is None else request.received_at
        sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
        sequence = Sequence(
            key=key,
            request=request,
            token_ids=[*request.prompt_token_ids, *output_token_ids],
            num_prompt=num_prompt,
            deadline=now + request.timeout_s,
            arrival=self._num_submitted,
            due=now + self.scheduler.slack_s(num_prompt + len(output_token_ids), request),
            end=min(num_prompt + sampling.max_tokens, info.max_context_tokens),
            min_end=num_prompt + sampling.min_tokens,
            stop_ids=frozenset((*(() if sampling.ignore_eos else info.eos_token_ids), *sampling.stop_token_ids)),
            handoff_id=handoff_id,
            input_from_previous=self._runner.takes_input_from_previous(sampling),
            num_resumed=len(output_token_ids),
            next_prompt_logprob=request.first_prompt_logprob if request.wants_prompt_logprobs else NEVER,
            clock=SequenceClock(now),
            num_alone=request.num_alone,
            sparse_from=info.sparse_from(request),
        )
        self._grammars.follow(sequence, grammar)
        self._embeddings.begin(sequence)
        self._num_submitted += 1
        self._sequences[key] = sequence
        self._deadlines.add(sequence)
        if handoff_id is not None:
            self.outgoing.open(handoff_id, sequence)
        if importing or (prefix and not self.cache.holds_most(sequence)):
            self.incoming.expect(sequence, is_prefix=prefix)
        else:
            self.scheduler.add(sequence)

    def abort(self, key: str) -> None:
        """Forget a sequence; idempotent. Its blocks are free at once, those of a hand-off when both sides let go."""
        error = RequestAborted("the request was aborted")
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._drop(sequence, error)
        else:
            self.outgoing.end_sealed(key, error)

    def end_lease(self, handoff_id: str, reads: SequenceOf[tuple[int, float]] = ()) -> None:
        """Free the leased blocks of a hand-off that is over (released, expired or aborted). Idempotent. `reads`:
        (bytes, seconds) of its sink."""
        unwanted = self.outgoing.end_lease(handoff_id, reads)
        if unwanted is not None:
            message = "no worker held the hand-off's lease while its prompt was being computed"
            self._fail(unwanted, LeaseLost(message))

    def caught_up(self, handoff_id: str) -> None:
        """Stop and seal a running sequence whose sink has read nearly all that was announced. Idempotent."""
        sequence = self.outgoing.running(handoff_id)
        if sequence is None or not sequence.is_decoding:
            return
        if self.steps.computes(sequence) or sequence.num_uncomputed > 1:  # it may write into the last block still
            self.steps.defer(lambda: self.caught_up(handoff_id))
        else:
            self._seal(sequence)

    def begin(self, key: str, seal: Seal) -> None:
        """Begin a sequence whose KV was read and whose source is asked for the release: compute its next token, and
        keep that, and the KV, to ourselves until `commit`. What is wrong with it is for `commit` to say."""
        if self._knows(seal.output_token_ids):
            self.incoming.begin(key, seal, self._clock())

    def commit(self, key: str, seal: Seal, times: PullTimes) -> None:
        """Run a sequence whose KV is here. Raises where the request is gone, or differs from what was sealed."""
        if not self._knows(seal.output_token_ids):
            raise HandoffError("the source sealed tokens that are not in the vocabulary")
        sequence = self.incoming.commit(key, seal)
        if sequence.provisional is not None:
            self._end_provisional(sequence, sequence.provisional, times)
        elif seal.output_token_ids:  # a sequence that is computed here but for its prefix queues since it came
            now = self._clock()
            sequence.clock = SequenceClock(now, times.committed(now))
        if sequence.handoff_id is not None:
            self.outgoing.announce(sequence)

    def step_failed(self, error: Exception) -> list[str]:
        """End the sequences of a step that raised; the next step reports it. Returns the ids of their requests.

        Raises InternalError, or whatever the books or the runner raise, where this worker is of no more use.
        """
        ended = self.steps.failed(error, self._sequences)
        for sequence, failure in ended.items():
            self._fail(sequence, failure)
        if num := self.check_integrity().num_unaccounted_blocks:
            raise InternalError(f"{num} KV blocks are unaccounted for after a step that failed") from error
        compute_two_tokens(self._runner, self.manager)
        return [sequence.request_id for sequence in ended]

    def step(self, publish: Callable[[StepOutput], object] | None = None) -> StepOutput:
        """Compute one batch and return everything that happened since the last call. The next may be launched already.

        `publish` gets what hand-offs have to say while the batch is computed; without it, that is returned too.
        """
        for sequence, error in self._deadlines.expired(self._clock(), self._sequences):
            self._fail(sequence, error)
        num_preemptions = self.scheduler.num_preemptions
        batch = self.steps.first or self.scheduler.schedule(self._clock())
        if self.scheduler.num_preemptions != num_preemptions:
            self.outgoing.end_preempted()
        if batch:
            tell = partial(self._output.tell, publish)
            tell()
            try:
                if not self.steps:
                    self.steps.launch(batch, tell)
                step = self.steps.finish(self._sequences, tell)
            except OutOfDeviceMemory as error:
                for sequence in self.steps.give_up(error, self._sequences):
                    self._fail(sequence, error)
            else:
                self.outgoing.end_step(step.watch, step.seconds)
                self._advance(step.batch, step.began)
                self._embed(step.batch.pooled or ())
                if step.batch.prompt_logprobs is not None:
                    self._output.add_prompt_logprobs(step.batch.prompt_logprobs)
                self._accept(self._end_ungrammatical(step.sampled))
            self.steps.run_deferred()
        self.incoming.grant_reservations()
        return self._output.take(ran=bool(batch))

    def fail_import(self, key: str, *, quarantine: bool) -> None:
        """End an import whose pull failed. Whoever pulled reports it, unless only a prefix was to come: then
        the sequence is computed here. Idempotent."""
        if self.incoming.fail(key, quarantine=quarantine) is not None:
            sequence = self._sequences.pop(key)
            self.outgoing.end(sequence, HandoffError("the sequence's own KV could not be pulled"))

    def next_deadline(self) -> float:
        return min(self._deadlines.next, self.scheduler.next_unpark())

    def check_integrity(self) -> worker_pb2.WorkerState:
        """Compare all bookkeeping. The counts in the answer say what is wrong, and what is held."""
        self.cache.check_integrity()
        self.outgoing.check_integrity()
        tables = [*self.scheduler.tables(), *self.incoming.waiting_tables()]
        return worker_pb2.WorkerState(
            load=self._load.report(),
            num_cached_blocks=self.manager.num_cached,
            num_unaccounted_blocks=self.manager.check_integrity(tables),
            num_open_handoffs=self.outgoing.num_open + self.incoming.num_open,
            experts=self._load.experts(),
        )

    def all_block_names(self) -> list[bytes]:
        return self.cache.names()

    def set_prefill_budget(self, num_tokens: int) -> None:
        """Let the next steps compute so many prompt tokens beside decodes; a whole step's at most. If that becomes 0,
        prompts that have not begun go back to their routers, which may send them here again."""
        scheduler = self.scheduler
        before, scheduler.prefill_budget = scheduler.prefill_budget, min(num_tokens, scheduler.config.step_tokens)
        if before > 0 == num_tokens:
            for sequence in scheduler.not_begun():
                self._fail(sequence, PromptReturned("the worker computes no prompts any more, and had not begun this"))

    def _end_ungrammatical(self, sampled: SequenceOf[SampledToken]) -> SequenceOf[SampledToken]:
        """End the sequences that cannot follow their grammar; return the tokens of the others."""
        ended = self._grammars.take_failed()
        for sequence, error in ended.items():
            if self._sequences.get(sequence.key) is sequence:
                self._fail(sequence, error)
        return [token for token in sampled if token.sequence not in ended] if ended else sampled

    def _advance(self, batch: Batch, began: float) -> None:
        """Count what the batch computed as cached, but for drafted tokens. This and `_accept` run once a token."""
        if batch.pooled is not None:
            self._embeddings.add(batch.pooled)
        block_size = self.cache.block_size
        for entry in batch.entries:
            sequence = entry.sequence
            before = sequence.num_computed
            after = sequence.num_computed = before + (1 if type(entry) is DraftEntry else entry.num_new)
            if sequence.clock is not None:
                sequence.clock.start(began)
            if after // block_size != before // block_size:
                self._store(sequence, before // block_size)

    def _advance_drafted(self, sequence: Sequence) -> None:
        """Count an accepted token as cached, once another one follows it."""
        sequence.num_computed += 1
        if sequence.num_computed % self.cache.block_size == 0:
            self._store(sequence, sequence.num_computed // self.cache.block_size - 1)

    def _store(self, sequence: Sequence, first_new_block: int) -> None:
        """Add full blocks to the prefix cache; those of a provisional sequence are added when it commits."""
        if sequence.provisional is None:
            self.cache.insert(sequence, first_new_block)
        if sequence.handoff_id is not None:
            self.outgoing.keep_replaced(sequence, first_new_block)
            if sequence.request.is_prefix and not sequence.num_uncomputed:
                self._seal(sequence)

    def _end_provisional(self, sequence: Sequence, provisional: Provisional, times: PullTimes) -> None:
        """Accept what a provisional sequence computed: its source had held the KV."""
        sequence.provisional, sequence.is_held = None, False
        assert sequence.clock is not None
        token = provisional.token
        sequence.clock.commit(times, 0.0 if token is None else self._clock() - provisional.sampled_at)
        if token is not None:
            self._accept([token])

    def _accept(self, sampled: SequenceOf[SampledToken]) -> None:
        tokens = self._output.tokens
        keys, token_ids, positions = tokens.keys, tokens.token_ids, tokens.positions
        for token in sampled:
            sequence, token_id = token.sequence, token.token_id
            if sequence.provisional is not None:
                sequence.provisional.keep(token, self._clock())
                continue
            ids = sequence.token_ids
            if len(ids) > sequence.num_computed:  # its last token was drafted
                self._advance_drafted(sequence)
            ids.append(token_id)
            num_tokens = len(ids)
            keys.append(sequence.key)
            token_ids.append(token_id)
            positions.append(num_tokens - sequence.num_prompt - 1)
            if sequence.matcher is not None and (run := self._grammars.run_after(token)):
                self._forward(token, run)
            elif (
                num_tokens >= sequence.end
                or token_id in sequence.stop_ids
                or sequence.clock is not None
                or sequence.handoff_id is not None
                or token.logprob is not None
            ):
                self._note(token)

    def _forward(self, token: SampledToken, run: list[int]) -> None:
        """Add the tokens that must follow one that was accepted. The next step computes all of them."""
        sequence, tokens = token.sequence, self._output.tokens
        if sequence.clock is not None:
            self._note(token)
        first = sequence.num_output
        sequence.token_ids += run
        self._load.num_forced_tokens += len(run)
        tokens.keys += [sequence.key] * len(run)
        tokens.token_ids += run
        tokens.positions += range(first, sequence.num_output)
        self.scheduler.forward(sequence)
        if sequence.finish_reason is not None:
            self._note(SampledToken(sequence, run[-1]))

    def _embed(self, pooled: Pooled) -> None:
        """End the sequences whose embeddings are complete."""
        for sequence in [sequence for sequence, _ in pooled if not sequence.num_uncomputed]:
            self._output.embeddings.append(self._embeddings.finished(sequence, self._stop_clock(sequence)))
            self._drop(sequence, RequestAborted("the embedding is computed"))

    def _note(self, token: SampledToken) -> None:
        """Add a token's note, and act on it: the sequence ends, or is sealed."""
        sequence = token.sequence
        finish = sequence.finish_reason
        num_cached = None if sequence.clock is None else sequence.num_cached
        timings = self._stop_clock(sequence)
        drafted = sequence.take_drafted()
        counts = sequence.num_stored, sequence.num_pulled
        note = TokenNote(finish, token.logprob, token.top, num_cached, timings, *drafted, *counts)
        self._output.tokens.notes[len(self._output.tokens) - 1] = note
        if finish is not None:
            sequence.status = SequenceStatus.FINISHED
            self._drop(sequence, RequestAborted(f"the sequence finished ({finish.value}) before it was handed off"))
        elif sequence.handoff_id is not None and self.outgoing.must_seal(sequence):
            self._seal(sequence)

    def _seal(self, sequence: Sequence) -> None:
        self.outgoing.sealing(sequence)
        self.scheduler.detach(sequence)
        del self._sequences[sequence.key]
        self.outgoing.seal(sequence)

    def _stop_clock(self, sequence: Sequence) -> SequenceTimings | None:
        """Timings until the sequence's first token here; None later."""
        clock, sequence.clock = sequence.clock, None
        return None if clock is None else clock.timings(self._clock())

    def _fail(self, sequence: Sequence, error: DiptychError) -> None:
        self._output.failures.append(FailureEvent(sequence.key, error))
        self._drop(sequence, error)

    def _drop(self, sequence: Sequence, error: DiptychError) -> None:
        del self._sequences[sequence.key]
        if sequence.status is SequenceStatus.IMPORTING or sequence.provisional is not None:
            self.incoming.give_up(sequence.key, error)
        else:
            self.scheduler.remove(sequence)
        self.outgoing.end(sequence, error)

    def _knows(self, token_ids: SequenceOf[int]) -> bool:
        return all(0 <= token_id < self._runner.info.vocab_size for token_id in token_ids)
