"""The engine: schedule -> run -> postprocess, one step at a time, on one thread.

It owns every Sequence of the worker and all block bookkeeping. It knows no socket and no event loop: commands come in
as method calls (engine_thread.py makes them from other threads), events go out in a StepOutput. Moves of KV are
announced in the StepOutput and carried out by handoff_source.py and handoff_sink.py, which come back through `reserve`,
`commit`, `fail`, `settle` and `end_lease`.
"""

import heapq
import time
from collections.abc import Callable

from ..proto import worker_pb2
from .block_manager import BlockManager
from .engine_events import FailureEvent, HandoffEnded, StepOutput, TokenEvent
from .engine_handoff import HandoffLedger
from .errors import DeadlineExceeded, DiptychError, InternalError, InvalidRequest, LeaseLost, RequestAborted
from .prefix_cache import PrefixCache
from .request import Request, check_token_ids
from .runner import Runner
from .scheduler import Role, Scheduler, SchedulerConfig
from .sequence import Batch, FinishReason, SampledToken, Sequence, SequenceStatus
from .timings import PullTimes, SequenceClock, SequenceTimings
from .wire import ROLE_TO_PROTO

LOAD_INTERVAL_S = 0.1


class Engine:
    """`clock` gives monotonic seconds. Every method must be called on one thread."""

    def __init__(
        self,
        runner: Runner,
        config: SchedulerConfig,
        *,
        prefix_cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self.manager = BlockManager(runner.memory.num_blocks)
        self.cache = PrefixCache(self.manager, runner.layout.block_size, enabled=prefix_cache)
        self.scheduler = Scheduler(config, self.manager, self.cache)
        self.handoffs = HandoffLedger(self.manager, self.cache, self.scheduler)
        self._sequences: dict[str, Sequence] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._output = StepOutput(0)
        self._num_submitted = 0
        self._num_prefill_tokens = 0
        self._num_decode_tokens = 0
        self._load_due = 0.0

    # -- commands ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        key: str,
        request: Request,
        output_token_ids: list[int],
        *,
        handoff_id: str | None = None,
        importing: bool = False,
    ) -> None:
        """Take a request. `handoff_id`: be the source; `importing`: be the sink, and wait for `reserve` and `commit`.

        A bad request becomes a FailureEvent, never an exception: the peer's mistake is not the engine's.
        """
        try:
            self._check(request, output_token_ids)
            if handoff_id is not None and self.handoffs.is_open(handoff_id):
                raise InvalidRequest("the hand-off id is in use: ids are single-use")
        except InvalidRequest as error:
            self._output.failures.append(FailureEvent(key, error))
            if handoff_id is not None:
                self._output.handoffs.append(HandoffEnded(handoff_id, error))
            return
        now = self._clock()
        sequence = Sequence(
            key=key,
            request=request,
            token_ids=[*request.prompt_token_ids, *output_token_ids],
            num_prompt=len(request.prompt_token_ids),
            deadline=now + request.timeout_s,
            arrival=self._num_submitted,
            handoff_id=handoff_id,
            num_resumed=len(output_token_ids),
            clock=SequenceClock(now),
        )
        self._num_submitted += 1
        self._sequences[key] = sequence
        heapq.heappush(self._deadlines, (sequence.deadline, key))
        if handoff_id is not None:
            self.handoffs.open(handoff_id, sequence)
        if importing:
            self.handoffs.expect(sequence)
        else:
            self.scheduler.add(sequence)

    def abort(self, key: str) -> None:
        """Forget a sequence; idempotent. Its blocks are free at once, those of a hand-off when both sides let go."""
        error = RequestAborted("the request was aborted")
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._drop(sequence, error)
        else:
            self._output.handoffs += self.handoffs.end_sealed(key, error)

    def end_lease(self, handoff_id: str) -> None:
        """The hand-off is over (released, expired or aborted): its leased blocks are free. Idempotent."""
        sequence = self.handoffs.still_computing(handoff_id)
        if sequence is not None:
            sequence.handoff_id = None
            self._fail(sequence, LeaseLost("no worker held the hand-off's lease while its prompt was being computed"))
        self.handoffs.end_lease(handoff_id)

    def caught_up(self, handoff_id: str) -> None:
        """The sink has all blocks that were announced: a running sequence that is handed off may stop."""
        assert self.handoffs.is_open(handoff_id)

    def fail_all(self, error: DiptychError) -> None:
        """Fail every sequence that is not waiting for its KV (a step went wrong and left the cache in doubt)."""
        for sequence in list(self.scheduler.sequences()):
            self._fail(sequence, error)
        self.cache.clear()

    def step(self) -> StepOutput:
        """Compute one batch and return everything that happened since the last call."""
        self._expire()
        batch = self.scheduler.schedule()
        if batch:
            began = self._clock()
            sampled = self._runner.run(batch)
            self._advance(batch, began)
            for token in sampled:
                self._accept(token)
        self.handoffs.grant_reservations()
        return self._take_output(ran=bool(batch))

    def commit(self, key: str, num_computed: int, output_token_ids: list[int], times: PullTimes) -> None:
        """The KV for `key` is here: see HandoffLedger.commit."""
        self.handoffs.commit(key, num_computed, output_token_ids)
        now = self._clock()
        self._sequences[key].clock = SequenceClock(now, times.committed(now))

    def fail_import(self, key: str, *, quarantine: bool) -> None:
        """The pull for `key` is over without its KV; whoever pulled reports it. Idempotent."""
        if self.handoffs.fail(key, quarantine=quarantine) is not None:
            del self._sequences[key]

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def check_integrity(self) -> worker_pb2.WorkerState:
        """Compare all bookkeeping; the counts in the answer are what is wrong, and what is held."""
        self.cache.check_integrity()
        tables = [s.block_table for s in self.scheduler.sequences()] + self.handoffs.importing_tables()
        return worker_pb2.WorkerState(
            load=self._load_report(),
            num_cached_blocks=self.manager.num_cached,
            num_unaccounted_blocks=self.manager.check_integrity(tables),
            num_open_handoffs=self.handoffs.num_open,
        )

    def all_block_names(self) -> list[bytes]:
        return self.cache.names()

    def set_role(self, role: Role) -> None:
        self.scheduler.role = role

    # -- one step ---------------------------------------------------------------------------------------------------

    def _advance(self, batch: Batch, began: float) -> None:
        block_size = self._runner.layout.block_size
        for entry in batch.entries:
            sequence = entry.sequence
            if sequence.is_decoding:
                self._num_decode_tokens += 1
            else:
                self._num_prefill_tokens += entry.num_new
            if sequence.clock is not None:
                sequence.clock.start(began)
            first_new_block = sequence.num_computed // block_size
            sequence.num_computed += entry.num_new
            self.cache.insert(sequence, first_new_block)
            if sequence.handoff_id is not None:
                self._output.handoffs += self.handoffs.announce(sequence)

    def _accept(self, token: SampledToken) -> None:
        sequence = token.sequence
        sequence.token_ids.append(token.token_id)
        finish = self._finish_reason(sequence)
        is_first_here = sequence.num_output == sequence.num_resumed + 1
        self._output.tokens.append(
            TokenEvent(
                key=sequence.key,
                token_id=token.token_id,
                position=sequence.num_output - 1,
                finish=finish,
                logprob=token.logprob,
                top=token.top,
                num_cached=sequence.num_cached if is_first_here else None,
                timings=self._stop_clock(sequence),
            )
        )
        if finish is not None:
            sequence.status = SequenceStatus.FINISHED
            self._drop(sequence, RequestAborted(f"the sequence finished ({finish.value}) with its first token"))
        elif sequence.handoff_id is not None:
            self.scheduler.detach(sequence)
            del self._sequences[sequence.key]
            self._output.handoffs.append(self.handoffs.seal(sequence))

    def _stop_clock(self, sequence: Sequence) -> SequenceTimings | None:
        """With its first token here."""
        clock, sequence.clock = sequence.clock, None
        return None if clock is None else clock.timings(self._clock())

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        sampling = sequence.request.sampling
        last = sequence.token_ids[-1]
        if sequence.num_output >= sampling.min_tokens:
            is_eos = not sampling.ignore_eos and last in self._runner.info.eos_token_ids
            if is_eos or last in sampling.stop_token_ids:
                return FinishReason.STOP
        if sequence.num_output >= sampling.max_tokens or sequence.num_tokens >= self._runner.info.max_context_tokens:
            return FinishReason.LENGTH
        return None

    def _expire(self) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key = heapq.heappop(self._deadlines)
            sequence = self._sequences.get(key)
            if sequence is not None:
                self._fail(
                    sequence,
                    DeadlineExceeded(
                        f"the request was not finished within its {sequence.request.timeout_s:.3g} s "
                        f"({sequence.num_output} tokens made): allow more time or ask for fewer tokens"
                    ),
                )

    # -- ends -------------------------------------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, error: DiptychError) -> None:
        self._output.failures.append(FailureEvent(sequence.key, error))
        self._drop(sequence, error)

    def _drop(self, sequence: Sequence, error: DiptychError) -> None:
        del self._sequences[sequence.key]
        if sequence.status is SequenceStatus.IMPORTING:
            self.handoffs.give_up(sequence.key, error)
            return
        self.scheduler.remove(sequence)
        if sequence.handoff_id is not None:
            self._output.handoffs.append(self.handoffs.end(sequence.handoff_id, error))

    def _check(self, request: Request, output_token_ids: list[int]) -> None:
        info = self._runner.info
        request.validate(info.vocab_size, info.max_context_tokens)
        check_token_ids(tuple(output_token_ids), info.vocab_size, "output_token_ids")
        if len(output_token_ids) >= request.sampling.max_tokens:
            raise InvalidRequest("output_token_ids already hold max_tokens tokens: nothing is left to compute")

    def _take_output(self, *, ran: bool) -> StepOutput:
        output = self._output
        output.ran = ran
        output.stored, output.removed = self.cache.take_events()
        now = self._clock()
        if now >= self._load_due or not ran:
            self._load_due = now + LOAD_INTERVAL_S
            output.load = self._load_report()
        self._output = StepOutput(output.step + 1)
        return output

    def _load_report(self) -> worker_pb2.LoadReport:
        return worker_pb2.LoadReport(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting + self.handoffs.num_importing,
            num_blocks=self.manager.num_blocks,
            num_free_blocks=self.manager.num_free,
            num_leased_blocks=self.manager.num_leased,
            num_quarantined_blocks=self.manager.num_quarantined,
            role=ROLE_TO_PROTO[self.scheduler.role],
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_handoffs_sent=self.handoffs.num_sent,
            num_handoffs_received=self.handoffs.num_received,
            num_handoffs_failed=self.handoffs.num_failed,
            num_cached_tokens=self.scheduler.num_cached_tokens,
            num_waiting_tokens=sum(s.num_uncomputed for s in self.scheduler.sequences() if not s.is_decoding),
        )


def internal(error: BaseException) -> InternalError:
    """A bug of ours, as the peer gets to see it."""
    return InternalError(f"a step failed ({type(error).__name__}: {error}); the worker's log has the traceback")
