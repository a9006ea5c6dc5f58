"""The network between simulated processes: connections that are made, delayed, cut and lost as TCP's are.

    host --connect--> CONNECTING --two trips--> UP --either side learns of an end, each in its own time--> BROKEN

A direction between two hosts may be blocked for a while: what is sent waits and arrives afterwards, as retransmitted
packets do; who pings in vain breaks the connection after KEEPALIVE_S. A process that is killed resets its connections,
one that is stopped accepts new ones and answers nothing. Ordering is each call's own affair (rpc.py): packets of
different calls overtake each other.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..checks.reasons import Troubles
from .clock import Clock, ProcessLoop

if TYPE_CHECKING:
    from .rpc import SimServer

KEEPALIVE_S = (2.0, 4.0)  # until a peer that does not answer pings is given up; real ones: 5 to 10
CONNECT_TIMEOUT_S = 5.0  # real ones: 20
RETRANSMIT_S = 0.2  # at most, after a direction is open again


class Connection:
    """TCP connection. `on_broken` of each side is called once, in that side's process."""

    def __init__(self, network: "Network", client: ProcessLoop, host: str) -> None:
        self.network = network
        self.client = client
        self.host = host
        self.server: SimServer | None = None
        self.is_up = False
        self.client_knows = False  # that it is broken
        self.server_knows = False
        self.on_up: list[Callable[[], None]] = []
        self.client_ends: dict[int, Callable[[str], None]] = {}  # by call
        self.server_ends: dict[int, Callable[[str], None]] = {}
        network.connections[self] = None
        network.send(client, host, self._arrive)
        network.clock.after(CONNECT_TIMEOUT_S, self._time_out)

    def peer_of(self, side: ProcessLoop) -> ProcessLoop | None:
        if side is self.client:
            return None if self.server is None else self.server.process
        return self.client

    def _arrive(self) -> None:
        network = self.network
        server = network.servers.get(self.host)
        if server is None or server.process.is_dead:
            network.transit(self.host, self.client.name, self.client_breaks, "connection refused")
            return
        self.server = server
        network.deliver(server.process, self._accept)

    def _accept(self) -> None:
        assert self.server is not None
        self.network.send(self.server.process, self.client.name, self._come_up)

    def _come_up(self) -> None:
        self.network.deliver(self.client, self._on_up)

    def _on_up(self) -> None:
        if self.client_knows:
            return
        self.is_up = True
        waiting, self.on_up = self.on_up, []
        for act in waiting:
            act()

    def _time_out(self) -> None:
        if not self.is_up:
            self.client_breaks("connect timed out")

    def client_breaks(self, why: str) -> None:
        """The client's side learns of the end, or makes it."""
        if not self.client_knows:
            self.client_knows = True
            self.on_up.clear()
            self.network.deliver(self.client, self._tell, self.client_ends, why)
            if self.server is not None and not self.server_knows:
                self.network.send(self.client, self.host, self.server_breaks, "reset by peer")
        self._retire()

    def server_breaks(self, why: str) -> None:
        if self.server is not None and not self.server_knows:
            self.server_knows = True
            self.network.deliver(self.server.process, self._tell, self.server_ends, why)
            if not self.client_knows:
                self.network.send(self.server.process, self.client.name, self.client_breaks, "reset by peer")
        self._retire()

    def _tell(self, ends: dict[int, Callable[[str], None]], why: str) -> None:
        for end in list(ends.values()):
            end(why)
        ends.clear()

    def _retire(self) -> None:
        server_done = self.server is None or self.server_knows or self.server.process.is_dead
        if server_done and (self.client_knows or self.client.is_dead):
            self.network.connections.pop(self, None)


class Network:
    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock = clock
        self.rng = rng
        self.latency_s = 0.002  # at most, of a packet on a good link
        self.troubles = Troubles()
        self.slowness: dict[tuple[str, str], float] = {}  # factor, by direction
        self.blocked: dict[tuple[str, str], float] = {}  # until when, by direction
        self.servers: dict[str, SimServer] = {}
        self.connections: dict[Connection, None] = {}
        self.num_delivered = 0
        self.on_delivery: Callable[[], None] = lambda: None
        self.trace: Callable[[str], None] | None = None
        self.flip = 0.0  # probability that a piece of KV arrives with another bit
        self.verifying: set[str] = set()  # hosts that would notice
        self.straggle = 0.0  # probability that a packet takes up to straggle_s
        self.straggle_s = 0.5

    def delay(self, src: str, dst: str) -> float:
        rng = self.rng
        delay = rng.random() * self.latency_s * self.slowness.get((src, dst), 1.0)
        if self.straggle and rng.random() < self.straggle:
            late_s = rng.random() * self.straggle_s
            self.trouble(src, dst, late_s)
            delay += late_s
        return delay

    def is_blocked(self, src: str, dst: str) -> bool:
        return self.blocked.get((src, dst), 0.0) > self.clock.now

    def transit(self, src: str, dst: str, act: Callable[..., None], *args: Any) -> None:
        """Call `act(*args)` when a packet arrives from host to host, whichever process runs there then."""
        self.clock.after(self.delay(src, dst), self._arrived, src, dst, act, args)

    def send(self, sender: ProcessLoop, dst: str, act: Callable[..., None], *args: Any) -> None:
        if not sender.is_dead:
            self.transit(sender.name, dst, act, *args)

    def _arrived(self, src: str, dst: str, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.is_blocked(src, dst):
            later = self.blocked[src, dst] + self.rng.random() * RETRANSMIT_S
            self.clock.at(later, self._arrived, src, dst, act, args)
            return
        self.num_delivered += 1
        self.on_delivery()
        act(*args)

    def deliver(self, process: ProcessLoop, act: Callable[..., None], *args: Any) -> None:
        """Into the process: it runs when the process does."""
        if not process.is_dead:
            process.call_soon(act, *args)

    def trouble(self, a: str, b: str, seconds: float = 0.0) -> None:
        """Record trouble between two hosts from now on."""
        self.troubles.add(self.clock.now, self.clock.now + seconds, a, b)

    def carry(self, data: bytes, src: str, dst: str) -> bytes:
        """Return the bytes as they arrive."""
        if not self.flip or dst not in self.verifying or self.rng.random() >= self.flip:
            return data
        self.trouble(src, dst)
        at = self.rng.randrange(8 * len(data))
        return (int.from_bytes(data, "little") ^ 1 << at).to_bytes(len(data), "little")

    def slow_down(self, src: str, dst: str, factor: float) -> None:
        self.trouble(src, dst, float("inf"))
        self.slowness[src, dst] = factor

    def block(self, src: str, dst: str, seconds: float) -> None:
        self.trouble(src, dst, seconds)
        self.blocked[src, dst] = max(self.blocked.get((src, dst), 0.0), self.clock.now + seconds)
        for connection in list(self.connections):
            if {connection.client.name, connection.host} == {src, dst}:
                self._ping_in_vain(connection, lambda c: self.is_cut(c.client.name, c.host))

    def heal(self) -> None:
        for direction in self.blocked:
            self.blocked[direction] = self.clock.now
        self.slowness.clear()
        self.straggle = 0.0

    def on_stall(self, process: ProcessLoop) -> None:
        """Its peers ping in vain; it does not ping itself."""
        self.troubles.add(self.clock.now, process.stalled_until, process.name)
        for connection in list(self.connections):
            if connection.client is process:
                self._ping_in_vain(connection, lambda c: c.client.is_stalled, by_client=False)
            elif connection.server is not None and connection.server.process is process:
                self._ping_in_vain(connection, lambda c: process.is_stalled, by_server=False)

    def on_kill(self, process: ProcessLoop) -> None:
        self.troubles.add(self.clock.now, self.clock.now, process.name)
        for connection in list(self.connections):
            if connection.client is process and connection.server is not None:
                self.transit(process.name, connection.host, connection.server_breaks, "reset by peer")
            elif connection.server is not None and connection.server.process is process:
                self.transit(process.name, connection.client.name, connection.client_breaks, "reset by peer")
        for connection in list(self.connections):
            connection._retire()

    def cut(self, connection: Connection) -> None:
        """Both processes continue; each notices it at a different time, and one perhaps only by its pings."""
        self.trouble(connection.client.name, connection.host)
        sides = [connection.client_breaks, connection.server_breaks]
        self.rng.shuffle(sides)
        sides[0]("the link broke")

    def is_cut(self, a: str, b: str) -> bool:
        return self.is_blocked(a, b) or self.is_blocked(b, a)

    def _ping_in_vain(
        self,
        connection: Connection,
        still: Callable[[Connection], bool],
        *,
        by_client: bool = True,
        by_server: bool = True,
    ) -> None:
        def check(side: Callable[[str], None], process: ProcessLoop | None) -> None:
            if process is not None and not process.is_stalled and still(connection):
                side("keepalive")

        if by_client:
            self.clock.after(self.rng.uniform(*KEEPALIVE_S), check, connection.client_breaks, connection.client)
        if by_server and connection.server is not None:
            server = connection.server.process
            self.clock.after(self.rng.uniform(*KEEPALIVE_S), check, connection.server_breaks, server)
