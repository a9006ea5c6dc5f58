"""Does moving KV hide behind computing? Two questions, asked of real worker processes that compute on one core each.

    python -m benchmarks.transfer.overlap [--json] [--transport nixl --transport grpc] [--repeat 3] [--prompt 4096]
                                 [--at-rest] [--client-core 0]

1. With the link throttled 100 times: does time to first token stay? The same prefill worker hands off to one sink as
   fast as the link is, and to one that reads at a hundredth of the bandwidth measured before, in turn.
2. With the link as it is: how long after the first token comes the second, against the steady time per token of the
   same request? Once with the number of layer groups that the source chooses, once with one group.

The checkpoint is random, of the shape of a model of 135 M parameters (30 layers, hidden 576, 9 heads, 3 of them KV)
with a small vocabulary, in bfloat16. A client's times are those of the router's stream.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from diptych.cluster.routing.fleet import WorkerInfo
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.proto import kv_pb2, worker_pb2, worker_pb2_grpc
from diptych.workers.common.cores import bind_this_thread, cpus_of_this_thread
from diptych.workers.common.errors import ConfigError, RankLost
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.kv.layout import Copies, Region
from diptych.workers.server import service
from diptych.workers.server.service import WorkerAddress
from diptych.workers.server.worker import run_worker
from diptych.workers.transport.base import KVReader, Source, Transport

VOCAB = 8192
NEW_TOKENS = 24
CPUS = cpus_of_this_thread()  # a worker's, wherever its client is bound
THROTTLE = 100
THROTTLED_PROMPT = 512  # tokens
WARM_PROMPTS = (600, 1000, 300, 1200, 800)
KV_BYTES = 512 << 20
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
}


def make_checkpoint(path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.to(torch.bfloat16).save_pretrained(path)


# A worker: a process of its own, whose reads can be throttled


class ThrottledReader(KVReader):
    """Reads take as long as at `bytes_s`, one after the other."""

    def __init__(self, inner: KVReader, bytes_s: float, link: asyncio.Lock) -> None:
        self._inner, self._bytes_s, self._link = inner, bytes_s, link

    async def read(self, segment: kv_pb2.Segment, copies: Copies, into: Region) -> None:
        async with self._link:
            began = time.monotonic()
            await self._inner.read(segment, copies, into)
            await asyncio.sleep(max(copies.num_bytes / self._bytes_s - (time.monotonic() - began), 0.0))

    async def settled(self) -> None:
        await self._inner.settled()


class ThrottledTransport(Transport):
    def __init__(self, inner: Transport, bytes_s: float) -> None:
        self.name = inner.name
        self._inner, self._bytes_s, self._link = inner, bytes_s, asyncio.Lock()

    def publish(self, opened: kv_pb2.Opened) -> None:
        self._inner.publish(opened)

    async def connect(self, source: Source) -> KVReader:
        return ThrottledReader(await self._inner.connect(source), self._bytes_s, self._link)

    def serve(self, num_open: int) -> None:
        self._inner.serve(num_open)

    def forget(self, incarnation: str) -> None:
        self._inner.forget(incarnation)

    async def close(self) -> None:
        await self._inner.close()


async def work(core: int, bytes_s: float | None, cpus: Sequence[int], settings: dict[str, Any]) -> None:
    """Work until stdin ends."""
    bind_this_thread(cpus)
    if bytes_s is not None:
        make = service.make_transports

        def make_throttled(*args: Any, **named: Any) -> dict[str, Transport]:
            return {name: ThrottledTransport(inner, bytes_s) for name, inner in make(*args, **named).items()}

        service.make_transports = make_throttled
    config = WorkerConfig.of(threads=1, cores=(core,), prefix_cache=False, kv_memory_bytes=KV_BYTES, **settings)
    ready: Future[WorkerAddress] = Future()
    ready.add_done_callback(lambda f: f.exception() or print(json.dumps(asdict(f.result())), flush=True))
    stop = asyncio.Event()
    worker = asyncio.create_task(run_worker(config, ready, stop))
    await asyncio.to_thread(sys.stdin.read)
    stop.set()
    with suppress(RankLost):  # of one whom it shares experts with, which ended first
        await worker


@contextmanager
def worker(
    model: Path, role: str, core: int, bytes_s: float | None = None, **settings: object
) -> Generator[WorkerInfo]:
    all_settings = {"model": str(model), "role": role, **settings}
    given = json.dumps({"core": core, "bytes_s": bytes_s, "cpus": CPUS, "settings": all_settings})
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, "--work", given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise ConfigError(f"the {role} worker did not start; see its message above")
        ready = json.loads(line)
        yield WorkerInfo(ready["incarnation"], ready["address"], role, role)
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


# The client, and what it measures


@dataclass(frozen=True)
class Answer:
    ttft_s: float
    second_s: float  # from the first token to the second
    tpot_s: float  # median gap from the third on


class Client:
    """Requests through a router that knows one prefill and one decode worker."""

    def __init__(self, prefill: WorkerInfo, decode: WorkerInfo) -> None:
        self._infos = [prefill, decode]
        self._router = Router(RoutingConfig())
        self._num_asked = 0

    async def __aenter__(self) -> "Client":
        await self._router.start()
        self._router.update_fleet(self._infos)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._router.stop()

    async def keep_busy(self) -> None:
        """A short prompt, and answers as long as the context holds, until cancelled."""
        while True:
            await self.ask(64, SHAPE["max_position_embeddings"] - 64)

    async def ask(self, num_prompt: int, num_new: int = NEW_TOKENS) -> Answer:
        self._num_asked += 1
        prompt = random.Random(f"{id(self)} {self._num_asked}").choices(range(1, VOCAB), k=num_prompt)
        sampling = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        request = Request(f"request-{self._num_asked}", tuple(prompt), sampling, timeout_s=600.0)
        began, times = time.perf_counter(), list[float]()
        async for delta in self._router.stream(request):
            times += [time.perf_counter()] * len(delta.token_ids)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return Answer(times[0] - began, gaps[0], statistics.median(gaps[1:]))


async def link_of(decode: WorkerInfo, prefill: WorkerInfo) -> worker_pb2.PeerLink:
    async with grpc.aio.insecure_channel(decode.address) as channel:
        state = await worker_pb2_grpc.WorkerStub(channel).GetState(worker_pb2.GetStateRequest())
    return next(link for link in state.load.links if link.incarnation == prefill.incarnation)


@dataclass(frozen=True)
class SecondToken:
    second_s: float
    tpot_s: float
    ratio: float  # median over the requests
    num_segments: int  # of the last request
    ttft_s: float

    @classmethod
    def of(cls, answers: Sequence[Answer], num_segments: int) -> "SecondToken":
        return cls(
            second_s=statistics.median(a.second_s for a in answers),
            tpot_s=statistics.median(a.tpot_s for a in answers),
            ratio=statistics.median(a.second_s / a.tpot_s for a in answers),
            num_segments=num_segments,
            ttft_s=statistics.median(a.ttft_s for a in answers),
        )


@dataclass(frozen=True)
class Measured:
    link_bytes_s: float
    ttft_s: float
    throttled_ttft_s: float
    chosen: SecondToken
    one_group: SecondToken


async def second_tokens(
    prefills: Sequence[WorkerInfo], decode: WorkerInfo, num_prompt: int, repeat: int, at_rest: bool
) -> list[SecondToken]:
    """Measure with each prefill worker, in turn. `at_rest`: the decode worker has nothing else to do."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(prefill, decode)) for prefill in prefills]
        # The first prompt touches the memory that is measured: pages that are new to the machine cost more than the
        # wire. The others show the source what reads cost.
        for num_warm in (num_prompt, *WARM_PROMPTS):
            for client in clients:
                await client.ask(num_warm, 3)
        # A decode worker at rest while a prompt is read takes its first steps slowly, whatever moves its KV: another
        # sequence keeps it going, as on any worker in use.
        company = None if at_rest else asyncio.create_task(clients[0].keep_busy())
        answers: list[list[Answer]] = [[] for _ in prefills]
        num_segments = [0 for _ in prefills]
        for _ in range(repeat):
            for i, (prefill, client) in enumerate(zip(prefills, clients, strict=True)):
                before = (await link_of(decode, prefill)).num_reads
                answers[i].append(await client.ask(num_prompt))
                num_segments[i] = (await link_of(decode, prefill)).num_reads - before
        if company is not None:
            company.cancel()
            await asyncio.gather(company, return_exceptions=True)
    return [SecondToken.of(found, number) for found, number in zip(answers, num_segments, strict=True)]


async def first_token(prefill: WorkerInfo, decodes: Sequence[WorkerInfo], repeat: int) -> list[float]:
    """Median TTFT with each decode worker, in turn."""
    async with Client(prefill, decodes[0]) as one, Client(prefill, decodes[1]) as other:
        found: list[list[float]] = [[], []]
        for number in range(repeat + 1):
            for times, client in zip(found, (one, other), strict=True):
                answer = await client.ask(THROTTLED_PROMPT, 3)
                if number:  # the first connects
                    times.append(answer.ttft_s)
    return [statistics.median(times) for times in found]


async def measure(model: Path, transport: str, num_prompt: int, repeat: int, at_rest: bool) -> Measured:
    with ExitStack() as stack:
        prefill = stack.enter_context(worker(model, "prefill", 0, transports=(transport,)))
        grouped = stack.enter_context(worker(model, "prefill", 0, transports=(transport,), layer_groups=1))
        decode = stack.enter_context(worker(model, "decode", 1, transports=(transport,)))
        chosen, one_group = await second_tokens([prefill, grouped], decode, num_prompt, repeat, at_rest)
        link = await link_of(decode, prefill)
        bytes_s = link.num_bytes / link.read_s
        slow = stack.enter_context(worker(model, "decode", 1, bytes_s / THROTTLE, transports=(transport,)))
        ttft_s, throttled_ttft_s = await first_token(prefill, [decode, slow], 2 * repeat)
    return Measured(bytes_s, ttft_s, throttled_ttft_s, chosen, one_group)


# What it says


def show(name: str, m: Measured, num_prompt: int) -> None:
    print(f"{name}: the link carried {m.link_bytes_s / 1e9:.2f} GB/s")
    change = m.throttled_ttft_s / m.ttft_s - 1
    print(f"  TTFT, {THROTTLED_PROMPT} tokens: {m.ttft_s * 1e3:.1f} ms; throttled {THROTTLE} times: {change:+.1%}")
    for how, s in (("chosen groups", m.chosen), ("one group", m.one_group)):
        print(
            f"  {num_prompt} tokens, {how} ({s.num_segments} segments): second token after {s.second_s * 1e3:.1f} ms, "
            f"TPOT {s.tpot_s * 1e3:.1f} ms: {s.ratio - 1:+.0%}; TTFT {s.ttft_s:.2f} s"
        )


async def main(transports: Sequence[str], num_prompt: int, repeat: int, at_rest: bool, as_json: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        results = {name: await measure(Path(folder), name, num_prompt, repeat, at_rest) for name in transports}
    if as_json:
        print(json.dumps({name: asdict(result) for name, result in results.items()}))
        return
    for name, result in results.items():
        show(name, result, num_prompt)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", action="append", choices=["shared_memory", "nixl", "grpc"], help="default: nixl")
    parser.add_argument("--repeat", type=int, default=3, help="requests for each figure; twice as many for TTFT")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens")
    parser.add_argument("--at-rest", action="store_true", help="no other sequence decodes meanwhile")
    parser.add_argument("--client-core", type=int, help="of the client, which is the router too; default: any")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        asyncio.run(work(**json.loads(given.work)))
    else:
        bind_this_thread(None if given.client_core is None else (given.client_core,))
        asyncio.run(main(given.transport or ["nixl"], given.prompt, given.repeat, given.at_rest, given.json))
