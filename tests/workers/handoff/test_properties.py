"""The two machines of a hand-off under any order of calls: the ends are reached once, and for good reason."""

from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.workers.common.errors import RequestAborted
from diptych.workers.handoff.types import (
    Answer,
    Begin,
    Commit,
    EndLease,
    Fail,
    Offer,
    Refuse,
    Release,
    Renew,
    SinkState,
    SourceState,
)
from diptych.workers.kv.segment import Read, Segment

from ...support.handoff_machines import FIRST, LAST, NUM_LAYERS, SEAL, sink, source

SOURCE_CALLS = st.one_of(
    st.tuples(st.just("subscribe"), st.sampled_from("ab")),
    st.tuples(st.just("leave"), st.sampled_from("ab")),
    st.tuples(st.just("renew"), st.sampled_from("ab")),
    st.tuples(st.just("release"), st.sampled_from("ab")),
    st.tuples(st.just("announce"), st.none()),
    st.tuples(st.just("seal"), st.none()),
    st.tuples(st.just("abort"), st.none()),
    st.tuples(st.just("tick"), st.none()),
)


@settings(deadline=None)
@given(st.lists(st.tuples(SOURCE_CALLS, st.floats(0, 6)), max_size=30))
def test_the_lease_ends_once_and_held_is_never_said_of_a_lapsed_one(calls: list[tuple[tuple[str, str], float]]) -> None:
    machine, now, last_contact = source(), 0.0, 0.0
    position, ends, holder = 0, 0, None
    for (name, sink_name), pause in calls:
        now += pause
        was_live, lapsed = machine.is_live, now >= last_contact + 10.0
        if name == "announce":
            if position == 3 or machine.state is SourceState.SEALED:
                continue
            actions = machine.announce(Segment(position, (position,), (1,), 0, NUM_LAYERS), now)
            position += 1
        elif name == "seal":
            if machine.state is SourceState.SEALED:
                continue
            actions = machine.seal(11, [7], now)
        elif name == "abort":
            actions = machine.abort(RequestAborted("x"), now)
        elif name == "tick":
            actions = machine.tick(now)
        else:
            actions = getattr(machine, name)(sink_name, now)
        ends += actions.count(EndLease())
        if was_live and not lapsed:
            took_over = name == "subscribe" and not any(isinstance(a, Refuse) for a in actions)
            left = name == "leave" and sink_name == holder
            if took_over or left or (name == "renew" and sink_name == holder):
                last_contact = now
            holder = sink_name if took_over else None if left else holder
        assert ends == (not machine.is_live)
        if was_live and lapsed:
            assert machine.state is SourceState.EXPIRED
            assert Answer(True) not in actions
        if Answer(True) in actions:
            assert sink_name == holder


@settings(deadline=None)
@given(st.data())
def test_a_pull_ends_once_and_commits_only_what_was_read_and_held(data: st.DataObject) -> None:
    machine, now = sink(), 0.0
    reading: set[int] = set()
    segments = iter([FIRST, LAST])
    ends, begins, was_asked = 0, 0, False
    for _ in range(25):
        now += data.draw(st.floats(0, 5))
        calls = ["opened", "announced", "sealed", "reserved", "renewed", "released", "tick", "stream_ended"]
        name = data.draw(st.sampled_from(calls + ["read_done"] * 4 * bool(reading)))
        was_read = not reading
        match name:
            case "opened":
                actions = machine.opened(Offer(11, 3, 4, 12.0, NUM_LAYERS, NUM_LAYERS), now)
            case "announced":
                actions = machine.announced(next(segments, LAST), now)
            case "sealed":
                actions = machine.sealed(SEAL, now)
            case "reserved":
                if machine.state is not SinkState.PULLING or machine._table is not None:  # pyright: ignore[reportPrivateUsage]
                    continue
                actions = machine.reserved((0, 1, 2), 0, now)
            case "read_done":
                actions = machine.read_done(reading.pop(), now)
            case "tick" | "stream_ended":
                actions = getattr(machine, name)(now)
            case _:
                if not was_asked:
                    continue
                held = data.draw(st.booleans())
                actions = getattr(machine, name)(held, now)
                if any(isinstance(action, Commit) for action in actions):
                    assert name == "released" and held and was_read and begins == 1
        if any(isinstance(action, Begin) for action in actions):
            begins += 1
            assert begins == 1 and machine.state is SinkState.PULLED and not reading and Release() in actions
        reading |= {action.number for action in actions if isinstance(action, Read)}
        was_asked |= any(isinstance(action, Renew | Release) for action in actions)
        ends += sum(isinstance(action, Commit | Fail) for action in actions)
        assert ends == machine.is_over
        assert (machine.wake_at is None) == machine.is_over
