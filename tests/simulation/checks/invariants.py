"""Checks made at the end of a run, whatever happened in it."""

from typing import TYPE_CHECKING

from diptych.cluster.routing.token_source import TokenLogprob
from diptych.proto import worker_pb2
from diptych.workers.common.errors import DeadlineExceeded, Overloaded, RequestFailsSteps, Unavailable
from diptych.workers.core.sequence import Sequence, SequenceStatus

from ..processes.sleeps import is_sleepy
from .reasons import check_failure
from .sampling import logprobs
from .violation import Violation, demand

if TYPE_CHECKING:
    from ..processes.routers import RouterProcess
    from ..processes.worker import Worker
    from ..world import Client, World

SLACK_S = 0.5
CALM_QUIET_S = 0.5


def what_is_held(world: "World") -> str:
    """The first thing that a running process still holds, or nothing."""
    for at in world.routers.living():
        assert at.router is not None
        for view in at.router._fleet.views():
            if view.num_in_flight or view.pending_tokens or view.held_blocks or view.num_promised or view.promises:
                return f"{at.name} counts {view.num_in_flight} requests at {view.incarnation}"
        if at.router._drivers:
            return f"{at.name} has {len(at.router._drivers)} runs"
    for worker in world.living():
        service = worker.service
        if service is None or not worker.has_started:
            if world.is_supervised:
                continue  # its supervisor waits for it
            return f"{worker.incarnation} has not started"
        state = integrity(worker)
        load = state.load
        for what, count in (
            ("unaccounted blocks", state.num_unaccounted_blocks),
            ("leased blocks", load.num_leased_blocks),
            ("quarantined blocks", load.num_quarantined_blocks),
            ("blocks", load.num_blocks - load.num_free_blocks),
            ("open hand-offs", state.num_open_handoffs),
            ("sequences", load.num_running + load.num_waiting + len(worker.engine._sequences)),
            ("offers", service._source.num_open),
            ("pulls", len(service._pulls._tasks) + len(service._pulls._sink._pulls)),
            ("keys", sum(len(link.keys) for link in service._links)),
        ):
            if count:
                return f"{worker.incarnation} holds {count} {what}"
    return ""


def is_able(world: "World", router: "RouterProcess", worker: "Worker") -> bool:
    """Return whether the worker can take a request from that router."""
    if worker.incarnation not in router.listed or not worker.has_started or worker.process.is_stalled:
        return False
    assert worker.service is not None
    return not (worker.service._drain.has_begun or world.network.is_cut(router.name, worker.process.name))


def integrity(worker: "Worker") -> worker_pb2.WorkerState:
    try:
        return worker.engine.check_integrity()
    except AssertionError as e:
        raise Violation(f"the books of {worker.incarnation} do not agree: {e}") from e


def check_worker(world: "World", worker: "Worker") -> None:
    """Check what must hold at any time in a process that runs."""
    now, local = world.clock.now, worker.process.time()
    went_on_at = worker.process.local(worker.process.stalled_until)
    service = worker.service
    assert service is not None
    name = worker.incarnation
    holders = {c.request.sink_incarnation for c in service._server.calls if c.path.endswith("/Subscribe")}
    for handoff_id, outgoing in service._source._open.items():
        machine = outgoing.machine
        wake_at = machine.wake_at
        overdue = wake_at is not None and wake_at < local - 1e-6 and went_on_at < local - 1e-6
        demand(not overdue, f"{name}: the lease of {handoff_id} outlives its deadline")
        is_there = machine.sink is None or machine.sink in holders
        demand(is_there, f"{name}: {machine.sink} holds {handoff_id} and has gone")
    check_levels(world, worker)
    given_up = {i for i in service._source._open if _is_given_up(worker, i)}
    worker.check_for(given_up, now, "is open, and the engine gave it up")
    worker.check_for({k for k in worker.engine._sequences if service._links.of(k) is None}, now, "runs without a link")
    if world.weather.name == "calm":
        unheard = {k for k, s in worker.engine._sequences.items() if not _is_heard(world, worker, k, s)}
        worker.check_for(unheard, now, "runs, and nobody listens")
        worker.check_for(service.unaware(), now, "has not said that its router knows of the drain")


def check_levels(world: "World", worker: "Worker") -> None:
    """Each sequence has the times that its client asked for."""
    asked = {c.request.request_id: (c.request.level.ttft_s, c.request.level.tpot_s) for c in world.clients}
    for sequence in worker.engine._sequences.values():
        name, found = sequence.request.request_id, sequence.request.level
        is_known = asked.get(name, (None, None)) == (found.ttft_s, found.tpot_s)
        demand(is_known, f"{worker.incarnation}: {name} has the level {found}, not {asked.get(name)}")


def _is_heard(world: "World", worker: "Worker", key: str, sequence: Sequence) -> bool:
    """Return whether the very router that asked for the sequence still receives its tokens."""
    client = next((c for c in world.clients if c.request.request_id == sequence.request.request_id), None)
    if client is None or client.router is None or client.router.router is None:
        return True
    link = client.router.router._links.get(worker.incarnation)
    return link is None or int(key.partition("/")[2]) in link._listeners


def _is_given_up(worker: "Worker", handoff_id: str) -> bool:
    outgoing = worker.engine.outgoing._outgoing.get(handoff_id)
    return outgoing is not None and outgoing.has_ended


def check_end(world: "World") -> None:
    for client in world.clients:
        _check_client(world, client)
    if world.weather.name == "calm":
        # A prefix that was offered for a client that left then waits for its sink until the lease ends.
        has_left = any(client.leaves_at is not None for client in world.clients)
        is_quick = world.quiet_after_s <= CALM_QUIET_S + has_left * world.lease_s
        demand(is_quick, f"things were held for {world.quiet_after_s:.1f} s on a calm day")


def check_running(world: "World", client: "Client") -> None:
    """Return whether its client reads or not, a request ends by its deadline."""
    is_late = world.clock.now > _latest(client) and not client.is_cut
    if is_late and client.request.request_id in world.states:
        state = world.states[client.request.request_id]
        demand(state.is_over and not state.worker_requests(), f"{client.request.request_id} runs on after its deadline")


def _latest(client: "Client") -> float:
    return client.arrives_at + client.request.timeout_s + (client.router.stall_s if client.router else 0.0) + SLACK_S


def may_fail_on_a_calm_day(world: "World", request_id: str, source: worker_pb2.HandoffSource) -> bool:
    """Return whether the sequence had ended at its source, or goes on there: a running one moves only if its
    sink is quick, and its source does not run short of blocks before."""
    client = next(c for c in world.clients if c.request.request_id == request_id)
    if client.leaves_at is not None and client.leaves_at <= world.clock.now:
        return True
    running = {w.incarnation for w in world.living() if w.has_started and _drives(w, request_id, source.handoff_id)}
    return not running or (source.handoff_id in world.moves and source.incarnation in running)


def _drives(worker: "Worker", request_id: str, handoff_id: str) -> bool:
    """Return whether the request, or the prefix that is to be handed off, is computed there. A prefix that its sink did
    not need may still be computed when the request has ended."""
    return any(
        s.request.request_id == request_id
        and s.status is not SequenceStatus.IMPORTING
        and (not s.request.is_prefix or s.handoff_id == handoff_id)
        for s in worker.engine._sequences.values()
    )


def _check_client(world: "World", client: "Client") -> None:
    name, expected = client.request.request_id, client.expected
    if world.weather.name == "calm":
        state = world.states[name]
        demand(state.failures.num_attempts == 0, f"{name} was failed {state.failures.num_attempts} times on a calm day")
    is_right = client.tokens == expected[: len(client.tokens)]
    demand(is_right, f"{name}: wrong tokens {client.tokens}, not {expected}")
    sampling = client.request.sampling
    known = [TokenLogprob(t, *logprobs(t, i, sampling)) for i, t in enumerate(client.tokens)]
    is_told = client.logprobs == ([] if sampling.logprobs is None else known)
    demand(is_told, f"{name}: wrong log-probabilities {client.logprobs}")
    if client.finish is not None:
        is_whole = client.tokens == expected and client.error is None
        demand(is_whole, f"{name}: finished after {len(client.tokens)} of {len(expected)} tokens")
        return
    if client.has_left or client.is_cut:
        return
    world.step_faults.check(name)
    if isinstance(client.error, Overloaded):
        _check_refused(world, client, client.error)
        return
    if isinstance(client.error, RequestFailsSteps):
        world.step_faults.check_blamed(name)
        return
    demand(type(client.error) in (DeadlineExceeded, Unavailable), f"{name}: {client.error!r}")
    demand(world.weather.name != "calm", f"{name} failed on a calm day: {client.error!r}")
    assert client.ended_at is not None
    latest = _latest(client) + client.stops_s
    check_failure(world, client)
    demand(client.ended_at <= latest, f"{name} ended {client.ended_at - latest:.1f} s after its deadline")


def _check_refused(world: "World", client: "Client", error: Overloaded) -> None:
    """A request is refused only if it asked to be, or if its worker comes too late, before anything was done for it."""
    name, state = client.request.request_id, world.states[client.request.request_id]
    comes_too_late = error.message.startswith("no worker runs") and world.is_supervised and is_sleepy(world.seed)
    demand(client.request.level.refuse or comes_too_late, f"{name} would have waited, and was refused: {error.message}")
    has_begun = bool(state.story.attempts or client.tokens)
    demand(not has_begun, f"{name} was refused after {len(state.story.attempts)} attempts")
    demand(1 <= error.retry_after_s <= 60, f"{name} is to come again after {error.retry_after_s} s")
