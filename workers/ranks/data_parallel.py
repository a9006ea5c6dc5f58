"""Workers that share experts step together: a step of one takes what all of them hold. Each has an engine of its own,
which knows nothing of this; what follows is done where its batches are computed.

    nobody has a batch         all sleep
    somebody has one           rings the others, and computes step n + 1
    who hears that, or has one computes it too: its own batch, or else nothing but its experts' part

Who rings is not agreed on: all enter step n + 1 when somebody has a batch for it, and their sends and receives in each
layer of experts do the rest. A worker whose engine is between two steps waits for what that has next, so that
busy ones share steps instead of taking turns. A number counts steps, for a ring may come after its step.

On devices all ring, also those without a batch, and wait for the others' rings before they compute: with each goes the
size of a batch, and all launch layers of the largest (`agree`). To compute is to launch there: a step is over when the
next one may be launched after it, and who waits for its tokens says where it fails (`fail`). A batch that does not fit
what was agreed on waits for the next step, and its worker serves in this one.

Whoever computes something else on a device between two steps, a draft, keeps our thread out of the others' (`hold`).

One that ends, or whose step fails, is missed by the others in the midst of theirs: then they end too (PeerLost).
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..common.cores import bind_this_thread
from ..common.errors import DeviceLost, RankLost
from ..parallel.groups import Group
from ..parallel.rendezvous import PeerSockets, gloo_file, remove_if_empty
from ..parallel.stores import STALL

LOADED, READY = 0, 1  # announced before the first step: weights are read; what drafts is loaded, too
END_S = 1.0  # between a failed exchange with another worker and the detection of its end

GroupT = TypeVar("GroupT", bound=Group)
T = TypeVar("T")

log = logging.getLogger("diptych.worker")


def is_due(step: int, rung: Collection[int], has_batch: bool, is_idle: bool) -> bool:
    """Return whether this worker enters `step`, which is its next one. rung: the last step that each of the others rang
    for; is_idle: its engine has nothing to compute."""
    return has_batch or (is_idle and max(rung) >= step)


def join(peer_sockets: PeerSockets, make: Callable[[int, int, Path], GroupT]) -> GroupT:
    """Waits until all have read their weights, however long that takes. Ends the rendezvous. make: joins the others, as
    GlooGroup.join does. Raises RankLost."""
    peer_group = peer_sockets.group
    try:
        meet(peer_sockets, LOADED)
        group = make(peer_group.rank, peer_group.size, gloo_file(peer_group))
        group.meet()
    finally:
        if peer_group.rank == 0:
            gloo_file(peer_group).unlink(missing_ok=True)
        remove_if_empty(peer_group.rendezvous)
    return group


def meet(peer_sockets: PeerSockets, number: int) -> None:
    """Wait until all have announced `number`, however long that takes. Raises PeerLost."""
    peer_sockets.send(number)
    while min(peer_sockets.received.values(), default=number) < number:
        peer_sockets.wait()


@dataclass(frozen=True, slots=True)
class _Batch:
    compute: Callable[[], Any]
    future: "Future[Any]"
    size: int


class Peer(Protocol):
    """Interface of a worker's part in steps computed with the others."""

    def serve(self) -> None:
        """Compute a step without a batch of this worker's own. Raises RankLost."""
        ...

    def leave(self) -> None:
        """Compute no more steps: the other workers' current step fails."""
        ...


class DataParallelLoop:
    """A StepExecutor. `on_loss` is called once at most, on our thread, not after `close`; the thread stays on `cores`,
    where there are any."""

    runs_ahead = False

    def __init__(
        self,
        peer_sockets: PeerSockets,
        peer: Peer,
        on_loss: Callable[[RankLost], object],
        cores: Sequence[int] | None,
        agree: Callable[[Sequence[int]], bool] | None = None,
        first: int = LOADED + 1,
    ) -> None:
        """agree: told the sizes of all workers' batches, ours first, 0 where there is none, before each step, on the
        thread that computes it; returns whether our batch waits for the next one. None: nobody needs to know them.
        first: number of the first step, above all that were announced before."""
        self._peer_sockets, self._peer, self._on_loss, self._cores = peer_sockets, peer, on_loss, cores
        self._agree, self._first = agree, first
        self._computing: _Batch | None = None  # the thread's own
        self._lock = threading.Lock()  # protects the fields below; the peer sockets are open while there is no error
        self._between = threading.Condition(self._lock)  # told when a step is over
        self._batch: _Batch | None = None
        self._is_idle = True
        self._in_step = False
        self._is_closing = False
        self._failure: Exception | None = None
        self._error: RankLost | None = None
        self._thread = threading.Thread(target=self._run, name="diptych-data-parallel", daemon=True)
        self._thread.start()

    def submit(self, compute: Callable[[], T], size: int = 0) -> "Future[T]":
        """size: what `agree` is told of it."""
        batch = _Batch(compute, Future(), size)
        with self._lock:
            if self._error is not None:
                batch.future.set_exception(self._error)
            else:
                assert self._batch is None
                self._batch, self._is_idle = batch, False
                self._peer_sockets.wake()
        return batch.future

    def check(self) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._is_idle:
                self._is_idle = True
                self._peer_sockets.wake()

    def hold(self) -> None:
        """Compute no step without a batch of ours, until the next `check`: returns once none is under way. Not while
        one of ours is. Raises RankLost."""
        with self._between:
            self._is_idle = False
            self._between.wait_for(lambda: self._error is not None or not self._in_step)
            if self._error is not None:
                raise self._error

    def fail(self, error: Exception) -> RankLost:
        """End because a step failed after it was computed here: the others are in it. Returns what is to be said."""
        with self._lock:
            if self._error is None:
                self._failure = error
                self._peer_sockets.wake()
        self._thread.join()
        assert self._error is not None
        return self._error

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            if self._error is None:
                self._peer_sockets.wake()
        self._thread.join()

    def _run(self) -> None:
        bind_this_thread(self._cores)
        step = self._first
        try:
            while self._enters(step):
                self._take_part(step)
                step += 1
                with self._between:
                    self._in_step = False
                    self._between.notify_all()
            error = RankLost("the worker is closing")
        except DeviceLost as e:  # ours: others that end do so because of it
            error = e
        except RankLost as e:
            error = self._named(e)
        except Exception as e:
            # The others are in the midst of a step: nothing can be computed with them any more.
            log.exception("a step failed")
            error = RankLost(
                f"worker {self._peer_sockets.group.rank} of those that share experts failed in a step ({e})"
            )
        self._end(error)

    def _enters(self, step: int) -> bool:
        """Wait until `step` is due. Returns False where the worker closes instead."""
        while True:
            with self._lock:
                if self._failure is not None:
                    raise self._failure
                if self._is_closing:
                    return False
                batch = self._batch
                if batch is not None:
                    self._batch = None
                    if batch.future.set_running_or_notify_cancel():
                        self._computing = batch
                heard = self._peer_sockets.received
                self._check_heard(step, last=step)  # none can be beyond a step that takes all
                if is_due(step, heard.values(), self._computing is not None, self._is_idle):
                    self._in_step = True
                    return True
            self._peer_sockets.wait()

    def _take_part(self, step: int) -> None:
        batch = self._computing
        if batch is not None or self._agree is not None:
            self._peer_sockets.send(step, 0 if batch is None else batch.size)
        waits = False
        if self._agree is not None:
            self._wait_for_rings(step)
            waits = self._agree([0 if batch is None else batch.size, *self._peer_sockets.details(step)])
        if batch is None or waits:
            self._peer.serve()
            return
        computed = batch.compute()
        self._computing = None
        batch.future.set_result(computed)

    def _wait_for_rings(self, step: int) -> None:
        """Wait until all have rung for `step`. A faster one may have rung for the next one too, and waits for our ring
        for that."""
        stall_s = STALL.total_seconds()
        until = time.monotonic() + stall_s
        while missing := [rank for rank, number in self._peer_sockets.received.items() if number < step]:
            if self._failure is not None:
                raise self._failure
            if self._is_closing:
                raise RankLost("the worker is closing")
            if (left_s := until - time.monotonic()) <= 0:
                raise RankLost(f"of those that share experts {missing} did not come to a step within {stall_s:g} s")
            self._peer_sockets.wait(left_s)
        self._check_heard(step, last=step + 1)

    def _check_heard(self, step: int, last: int) -> None:
        """Raise RankLost if a worker rang for a step that it cannot have come to. last: the last one that it can."""
        heard = self._peer_sockets.received
        if max(heard.values()) > last:
            raise RankLost(f"a worker announced step {max(heard.values())} before step {step}: {heard}")

    def _named(self, error: RankLost) -> RankLost:
        """Return an error that names the worker that ended, where one has; otherwise `error`."""
        until = time.monotonic() + END_S
        try:
            while not self._is_closing and (left_s := until - time.monotonic()) > 0:
                self._peer_sockets.wait(left_s)
        except RankLost as named:
            return named
        return error

    def _end(self, error: RankLost) -> None:
        with self._between:
            self._error = error
            waiting, self._batch = self._batch, None
            self._between.notify_all()
        if waiting is not None and waiting.future.set_running_or_notify_cancel():
            waiting.future.set_exception(error)
        if self._computing is not None:
            self._computing.future.set_exception(error)
        if not self._is_closing:
            log.error("%s", error)
            self._on_loss(error)
        self._peer.leave()
        self._peer_sockets.close()
