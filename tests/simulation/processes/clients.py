"""Clients that may go away, and a stranger who asks for blocks that are not his."""

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc.aio

from diptych.cluster.routing.token_source import TokenLogprob
from diptych.proto import kv_pb2
from diptych.workers.common.errors import DiptychError
from diptych.workers.common.request import FinishReason, Request

from ..checks.sampling import SALTS, VOCAB_SIZE, choose_sampling, expected_output
from ..faults.faults import Weather
from ..machines.rpc import ClientCall, SimChannel

if TYPE_CHECKING:
    from ..world import World
    from .routers import RouterProcess

SHORT_S = 0.5  # for a client that stops reading to meet its deadline
TRAFFIC_S = 3.0  # in which the requests come


@dataclass(eq=False)
class Client:
    """Client of a request, and the tokens that it received."""

    request: Request
    arrives_at: float
    leaves_at: float | None
    stops_after: int | None = None  # tokens: then it does not read
    stops_s: float = 0.0  # for so long
    poison_at: int | None = None  # position of an output token that makes steps fail
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish: FinishReason | None = None
    error: DiptychError | None = None
    has_left: bool = False
    router: "RouterProcess | None" = None  # that it came to
    is_cut: bool = False  # for its router was killed
    ended_at: float | None = None

    @property
    def expected(self) -> list[int]:
        return expected_output(self.request)

    @property
    def outcome(self) -> str:
        if self.error is not None:
            return self.error.code
        if self.is_cut:
            return "cut"
        return "left" if self.has_left else "done"


def plan_clients(rng: random.Random, weather: Weather) -> list[Client]:
    """Prompts often begin alike, and come at once; some go on where an earlier one ended, some ask for several
    completions."""
    clients: list[Client] = []
    for number in range(rng.randint(3, 10)):
        arrives_at = rng.choice((0.5, rng.uniform(0.2, TRAFFIC_S)))
        earlier = [c for c in clients if c.arrives_at + 0.5 < arrives_at and len(c.request.prompt_token_ids) < 30]
        if earlier and rng.random() < 0.5:
            turn = rng.choice(earlier)
            shared = [*turn.request.prompt_token_ids, *turn.expected[:12]]
        else:
            shared = [(7 * i + 3) % VOCAB_SIZE for i in range(rng.choice((0, 8, 17)))]
        own = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 5 if earlier else 11))]
        max_tokens = rng.choice((1, 2, 6, 12, 24, 24))
        stops = rng.random() < weather.stop_reading
        timeout_s = 60.0 if weather.name == "calm" else rng.choice((SHORT_S,) if stops else (4.0, 15.0, 30.0))
        leaves_at = arrives_at + rng.random() if rng.random() < weather.leave else None
        salt = rng.choices(SALTS, (6, 1))[0]
        num = rng.choices((1, 2, 3), (8, 1, 1))[0]  # completions
        for name in [f"request-{number}"] if num == 1 else [f"request-{number}.{i}" for i in range(num)]:
            sampling, group = choose_sampling(rng, max_tokens), "" if num == 1 else f"request-{number}"
            request = Request(name, (*shared, *own), sampling, timeout_s, salt, group)
            client = Client(request, arrives_at, leaves_at)
            if rng.random() < weather.poison:
                client.poison_at = rng.randint(0, 3)
            if stops:
                client.stops_after, client.stops_s = rng.randint(1, max_tokens), rng.uniform(0.0, 4 * SHORT_S)
            clients.append(client)
    return clients


def forge_a_pull(world: "World") -> None:
    """Somebody asks for blocks that are not his: of another sink, reused since, or never announced."""
    offers = [
        (worker.process.name, handoff_id, outgoing.machine)
        for worker in world.living()
        if worker.has_started and worker.service is not None
        for handoff_id, outgoing in worker.service._source._open.items()
        if outgoing.machine.sink is not None and outgoing.machine._segments
    ]
    if not offers:
        return
    host, handoff_id, machine = world.rng.choice(offers)
    forged = kv_pb2.PullRequest(
        handoff_id=handoff_id, sink_incarnation=machine.sink, segment=world.rng.choice(machine._segments).to_proto()
    )
    kind = world.rng.choice(("sink", "generation", "block"))
    if kind == "sink":
        forged.sink_incarnation += "0"
    elif kind == "generation":
        forged.segment.generations[0] += 1
    else:
        forged.segment.block_ids[0] = (forged.segment.block_ids[0] + 1) % 8
    world.note(f"a forged pull from {host}: another {kind}")

    async def pull() -> None:
        channel = SimChannel(world.network, Weather(), f"{host}:1")
        try:
            async for _ in ClientCall(channel, "/diptych.v1.KVHandoff/Pull", forged, 5.0):
                world.bug(f"{host} answered a forged pull (another {kind})")
        except grpc.aio.AioRpcError:
            world.note("a forged pull was refused")
        await channel.close()

    world.outsider.call_soon(lambda: world.outsider.create_task(pull()))
