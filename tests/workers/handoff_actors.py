"""Who acts in handoff_world.py: a source engine, and the pulls of sink engines. What must never happen asserts here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diptych.workers.errors import DiptychError, OutOfBlocks, RequestAborted, TransportError, WorkerLost
from diptych.workers.handoff import SinkHandoff, SourceHandoff
from diptych.workers.handoff_types import (
    Abandon,
    Aborted,
    Answer,
    Commit,
    EndLease,
    EndStream,
    Fail,
    Offer,
    Read,
    Refuse,
    Release,
    Renew,
    Reserve,
    Seal,
    Segment,
    Settle,
    SinkAction,
    SourceAction,
    Tell,
)

if TYPE_CHECKING:
    from .handoff_world import World

LEASE_S = 1.0
TIMEOUT_S = 5.0
OPEN_BY_S = 2.0
BLOCK_SIZE = 4
NUM_LAYERS = 2
Content = tuple[object, ...]


def truth(position: int, layer: int) -> Content:
    """What the KV of one block and layer is."""
    return ("kv", position, layer)


class Process:
    """What has a memory, and may stop. `run` drops what comes after a kill, and puts off what comes during a stall."""

    def __init__(self, world: "World", num_blocks: int) -> None:
        self.world = world
        self.is_dead = False
        self.stalled_until = 0.0
        self.owner: list[object] = [None] * num_blocks
        self.memory: list[list[object]] = [["junk"] * NUM_LAYERS for _ in range(num_blocks)]

    def run(self, act: Callable[[], None]) -> None:
        if self.is_dead:
            return
        if self.world.now < self.stalled_until:
            self.world.at(self.stalled_until + self.world.delay(), lambda: self.run(act))  # in whatever order
        else:
            act()

    def allocate(self, owner: object, count: int) -> list[int]:
        blocks = [b for b, held_by in enumerate(self.owner) if held_by is None][:count]
        assert len(blocks) == count, "blocks leaked"
        for block in blocks:
            self.owner[block] = owner
        return blocks

    def free(self, blocks: list[int], owner: object) -> None:
        for block in blocks:
            assert self.owner[block] is owner, "freed what it does not own"
            self.owner[block] = None
            self.memory[block] = [f"reused at {self.world.now}"] * NUM_LAYERS


class SourceProcess(Process):
    def __init__(self, world: "World", num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_blocks = -(-num_tokens // BLOCK_SIZE)
        super().__init__(world, self.num_blocks + 2)
        self.machine = SourceHandoff(self.num_blocks, NUM_LAYERS, LEASE_S, world.now)
        self.table: list[int] = []
        self.num_ends = 0
        self.streams: dict[str, Attempt] = {}
        self.arm()
        world.soon(self, lambda: self.prefill(0))
        if world.happens(world.weather.abort):
            world.later(self, TIMEOUT_S, lambda: self.carry_out(self.machine.abort(RequestAborted("gone"), world.now)))

    def prefill(self, first: int) -> None:
        """Compute a chunk, and announce it in one or two ranges of layers."""
        if self.num_ends:
            return
        rng = self.world.rng
        count = min(rng.randint(1, 3), self.num_blocks - first)
        blocks = self.allocate(self, count)
        self.table += blocks
        cut = rng.choice([NUM_LAYERS, 1])
        for layers in (range(cut), range(cut, NUM_LAYERS)):
            for position, block in enumerate(blocks, first):
                for layer in layers:
                    self.memory[block][layer] = truth(position, layer)
            if layers:
                segment = Segment(first, tuple(blocks), (1,) * count, layers.start, len(layers))
                self.carry_out(self.machine.announce(segment, self.world.now))
        if first + count < self.num_blocks:
            self.world.soon(self, lambda: self.prefill(first + count))
        else:
            self.world.soon(self, lambda: self.carry_out(self.machine.seal(self.num_tokens, (7,), self.world.now)))

    def carry_out(self, actions: list[SourceAction]) -> None:
        for action in actions:
            match action:
                case Tell(sink=sink, what=what):
                    self.streams[sink].send(what)
                case EndStream(sink=sink):
                    self.streams[sink].send(None)
                case EndLease():
                    self.num_ends += 1
                    self.free(self.table, self)
                case Answer() | Refuse():
                    pass
        self.arm()

    def arm(self) -> None:
        wake_at = self.machine.wake_at
        if wake_at is not None:
            self.world.at(wake_at, lambda: self.run(self.tick))

    def tick(self) -> None:
        self.carry_out(self.machine.tick(self.world.now) if self.machine.wake_at is not None else [])


@dataclass(eq=False)
class Attempt:
    """One pull by one sink process: the machine, its blocks, its stream and its reads."""

    world: "World"
    sink: "SinkProcess"
    name: str
    machine: SinkHandoff = field(init=False)
    table: list[int] = field(default_factory=list[int])
    owner: object = None
    error: DiptychError | None = None
    is_broken: bool = False  # the stream
    stream_clear_at: float = 0.0
    num_landing: int = 0
    is_cancelled: bool = False
    is_quarantined: bool = False
    ended_at: float | None = None

    def __post_init__(self) -> None:
        self.owner = self
        now = self.world.now
        self.machine = SinkHandoff(NUM_LAYERS, deadline=now + TIMEOUT_S, open_by=now + OPEN_BY_S)
        self.arm()
        self.world.call(self.world.source, self.subscribe)
        if self.world.happens(self.world.weather.stream_break):
            self.world.later(self.sink, TIMEOUT_S / 2, self.break_stream)
        if self.world.happens(self.world.weather.cancel):
            self.world.later(self.sink, TIMEOUT_S / 2, lambda: self.give_up(RequestAborted("cancelled")))

    # The stream: in order, until it breaks

    def subscribe(self) -> None:
        source = self.world.source
        source.streams[self.name] = self
        actions = source.machine.subscribe(self.name, self.world.now)
        if actions and isinstance(refusal := actions[-1], Refuse):
            self.send(refusal)
        else:
            self.send("opened")
        source.carry_out(actions)

    def send(self, what: Segment | Seal | Aborted | Refuse | str | None) -> None:
        self.stream_clear_at = max(self.stream_clear_at, self.world.now + self.world.delay())
        self.world.at(self.stream_clear_at, lambda: self.sink.run(lambda: self.receive(what)))

    def receive(self, what: Segment | Seal | Aborted | Refuse | str | None) -> None:
        if self.is_broken:
            return
        machine, now, source = self.machine, self.world.now, self.world.source
        match what:
            case Segment():
                self.carry_out(machine.announced(what, now))
            case Seal():
                self.carry_out(machine.sealed(what, now))
            case Aborted():
                self.give_up(RequestAborted(what.message))
            case Refuse():
                self.give_up(what.error)
            case None:
                self.carry_out(machine.stream_ended(now))
            case _:
                self.carry_out(machine.opened(Offer(source.num_tokens, source.num_blocks, BLOCK_SIZE, LEASE_S), now))

    def break_stream(self) -> None:
        """Each side learns of it in its own time."""
        self.is_broken = True
        self.source_learns_that_it_left()
        self.world.later(self.sink, LEASE_S, lambda: self.give_up(WorkerLost("the stream broke")))

    def source_learns_that_it_left(self) -> None:
        source = self.world.source
        self.world.later(source, LEASE_S, lambda: source.carry_out(source.machine.leave(self.name, self.world.now)))

    # What the machine decides

    def give_up(self, error: DiptychError) -> None:
        self.carry_out(self.machine.failed(error, self.world.now))

    def carry_out(self, actions: list[SinkAction]) -> None:
        source, world = self.world.source, self.world
        for action in actions:
            match action:
                case Reserve():
                    world.soon(self.sink, self.reserve)
                case Read():
                    self.read(action)
                case Renew():
                    world.ask(self, lambda: source.machine.renew(self.name, world.now), self.machine.renewed)
                case Release():
                    assert self.num_landing == 0, "released before the last byte landed"
                    world.ask(self, lambda: source.machine.release(self.name, world.now), self.machine.released)
                case Abandon():
                    world.call(source, lambda: source.carry_out(source.machine.leave(self.name, world.now)))
                case Commit():
                    self.commit(action)
                case Fail():
                    self.fail(action)
                case Settle():
                    self.sink.free(self.table, self)
                    self.is_quarantined = False
        self.arm()

    def arm(self) -> None:
        wake_at = self.machine.wake_at
        if wake_at is not None:
            self.world.at(wake_at, lambda: self.sink.run(lambda: self.carry_out(self.machine.tick(self.world.now))))

    def reserve(self) -> None:
        if self.machine.is_over:
            return
        if self.world.happens(self.world.weather.refuse):
            self.give_up(OutOfBlocks("none free"))
            return
        self.table = self.sink.allocate(self, self.world.source.num_blocks)
        num_held = self.world.rng.choice([0, 0, 1, len(self.table) - 1])
        for position in range(num_held):
            self.sink.memory[self.table[position]] = [truth(position, layer) for layer in range(NUM_LAYERS)]
        self.carry_out(self.machine.reserved(tuple(self.table), num_held * BLOCK_SIZE, self.world.now))

    def commit(self, commit: Commit) -> None:
        assert self.num_landing == 0
        source = self.world.source
        assert commit == Commit(source.num_tokens, (7,))
        for position, block in enumerate(self.table):
            expected = [truth(position, layer) for layer in range(NUM_LAYERS)]
            assert self.sink.memory[block] == expected, f"committed wrong KV at {position}: {self.sink.memory[block]}"
        self.ended_at = self.world.now
        self.world.commits.append(self.name)

    def fail(self, fail: Fail) -> None:
        self.error = fail.error
        self.ended_at = self.world.now
        self.is_cancelled = True
        self.is_quarantined = fail.quarantine
        if not fail.quarantine:
            self.sink.free(self.table, self)
        else:
            self.world.outcomes["quarantine"] += 1
            self.settle_when_quiet()

    def settle_when_quiet(self) -> None:
        if self.is_quarantined and self.num_landing == 0 and not self.sink.is_dead:
            self.carry_out(self.machine.settled())

    # Reads: each layer of each block lands in its own time, also while either process is stalled

    def read(self, read: Read) -> None:
        world, segment = self.world, read.segment
        parts = [
            (theirs, ours, layer)
            for theirs, ours in zip(segment.block_ids, read.table[segment.first_block :], strict=False)
            for layer in range(segment.first_layer, segment.first_layer + segment.num_layers)
        ]
        takes = world.delay() + world.delay()
        goes_wrong = world.happens(world.weather.read_error)
        may_still_land = goes_wrong and world.rng.random() < 0.5
        left = len(parts)

        def land(part: tuple[int, int, int]) -> None:
            nonlocal left, goes_wrong
            theirs, ours, layer = part
            left -= 1
            self.num_landing -= 1
            if not (self.is_cancelled and world.rng.random() < 0.5):  # a cancelled read may stop, or not
                assert self.sink.is_dead or self.sink.owner[ours] is self, (
                    "a read landed in a block that was given back"
                )
                self.sink.memory[ours][layer] = world.source.memory[theirs][layer]
            goes_wrong |= world.source.is_dead
            if left == 0 and not goes_wrong:
                self.sink.run(lambda: self.carry_out(self.machine.read_done(read.number, world.now)))
            if self.is_cancelled:
                self.sink.run(self.settle_when_quiet)

        for part in parts:
            if goes_wrong and not may_still_land:
                break
            self.num_landing += 1
            world.at(world.now + takes * world.rng.random(), lambda part=part: land(part))
        if goes_wrong:
            error = TransportError("the read failed", may_still_land=may_still_land)
            at = world.now + takes * world.rng.random() * (0.5 if may_still_land else 1.0)
            world.at(at, lambda: self.sink.run(lambda: self.read_failed(read.number, error)))

    def read_failed(self, number: int, error: TransportError) -> None:
        now, landing = self.world.now, error.may_still_land
        self.carry_out(self.machine.read_failed(number, error, now, may_still_land=landing))


class SinkProcess(Process):
    pass
