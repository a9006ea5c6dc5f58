"""Counts the files and calls of ours on a request's paths: to the first kernel, a decode step, a hand-off, a lease.

    python -m benchmarks.serving.paths [--files] [--repeats 8]

A router and its workers run as threads of this process, over real sockets, with the compiled kernels and the model that
ships with Diptych. A call is counted when a function of `cluster`, `workers` or `kernels` begins or goes on. Nothing is
timed: the counts are the same on any machine, up to what runs beside a request (load reports, pings).

"Relay" counts the files that pass the request on: those with a frame on the stack at the moment when the router sends
it, when the worker's gRPC server gives it to the engine's thread, and when the first kernel is called.
"""

import argparse
import asyncio
import json
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from diptych.cluster.common.config_file import build
from diptych.cluster.common.deployment import Deployment
from diptych.cluster.placement.router_process import RouterProcess
from diptych.cluster.routing.fleet import WorkerInfo
from diptych.workers.common.event_loop import new_event_loop
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.server.worker import WorkerProcess

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny"
ROOMS = tuple(f"{ROOT / room}/" for room in ("cluster", "workers", "kernels"))
KERNELS = f"{ROOT / 'kernels'}/"
BLOCKS_FREE = (str(ROOT / "workers" / "core" / "block_manager.py"), "BlockManager.end_lease")
TOKEN = "the token of this cluster"
END_S = 60.0
PROMPT_TOKENS = 48  # three blocks
Call = tuple[str, str]  # file, function
HAND_OVERS = (("cluster/routing/worker_link.py", "submit"), ("workers/engine/thread.py", "post"), ("kernels/", ""))


class Trace:
    """Records every call of ours while it is on, in order, on all threads that began after `install`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.relays: dict[tuple[str, str], set[str]] = {}  # files on the stack at the first hand-over of each kind
        self._is_on = False

    def install(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    @contextmanager
    def on(self) -> Generator[None]:
        self.calls, self.relays = [], {}
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self._is_on and event == "call" and (path := frame.f_code.co_filename).startswith(ROOMS):
            name = frame.f_code.co_qualname
            self.calls.append((path, name))
            for place in HAND_OVERS:
                if place not in self.relays and place[0] in path and name.endswith(place[1]):
                    self.relays[place] = _files_on_stack(frame)


def _files_on_stack(frame: FrameType | None) -> set[str]:
    found = set[str]()
    while frame is not None:
        found.add(frame.f_code.co_filename)
        frame = frame.f_back
    return {path for path in found if path.startswith(ROOMS)}


class Served:
    """A router and the workers of `roles`, by HTTP."""

    def __init__(self, trace: Trace, roles: tuple[str, ...]) -> None:
        self._trace = trace
        self._hands_off = len(roles) > 1
        self._num_asked = 0
        self._workers = [WorkerProcess(_worker_config(role)) for role in roles]
        infos = []
        for worker, role in zip(self._workers, roles, strict=True):
            address = worker.start_in_thread()
            infos.append(WorkerInfo(address.incarnation, address.address, role, role))
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._router = self._run(self._start(infos, "prefill" in roles))

    async def _start(self, infos: list[WorkerInfo], split: bool) -> tuple[RouterProcess, int]:
        pools = {"prefill": {"replicas": int(split)}, "decode": {"replicas": int(split)}}
        pools["mixed"] = {"replicas": int(not split)}
        router = {"http_port": 0, "grpc_port": 0, "predict": False}  # by roles, so that prompts are handed off
        config = build({"model": str(MODEL), "pools": pools, "router": router})
        process = RouterProcess(Deployment(config, TOKEN, is_local=True))
        started = await process.start()
        process.update_fleet(infos)
        return process, started.http_port

    def complete(self, num_tokens: int) -> list[Call]:
        """The calls of one completion."""
        self._num_asked += 1
        prompt = [3 + (self._num_asked * 31 + 7 * i) % 500 for i in range(PROMPT_TOKENS)]  # nothing of it is cached
        body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "model": "tiny"}
        url = f"http://127.0.0.1:{self._router[1]}/v1/completions"
        ask = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        with self._trace.on():
            with urllib.request.urlopen(ask, timeout=60) as answer:
                json.load(answer)
            self._run(self._until_over())
        return self._trace.calls

    async def _until_over(self) -> None:
        """Wait for what follows the answer: of a hand-off, the end of its lease."""
        async with asyncio.timeout(END_S):
            while self._hands_off and not _has_freed(self._trace.calls):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)

    def wait_until_ready(self) -> None:
        url = f"http://127.0.0.1:{self._router[1]}/health"
        for _ in range(600):
            try:
                urllib.request.urlopen(url, timeout=5).close()
            except OSError:
                self._run(asyncio.sleep(0.1))
            else:
                return
        raise SystemExit("the workers did not become ready within 60 s")

    def close(self) -> None:
        self._run(self._router[0].stop())
        for worker in self._workers:
            worker.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: "object") -> "object":
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()  # type: ignore[arg-type]


def _worker_config(role: str) -> WorkerConfig:
    return WorkerConfig.of(model=str(MODEL), role=role, threads=1, kv_memory_bytes=16 << 20, auth_token=TOKEN)


@contextmanager
def served(trace: Trace, *roles: str) -> Generator[Served]:
    cluster = Served(trace, roles)
    try:
        cluster.wait_until_ready()
        for num_tokens in (4, 4, 4):
            cluster.complete(num_tokens)
        yield cluster
    finally:
        cluster.close()


def until(calls: list[Call], is_end: Callable[[Call], bool]) -> list[Call]:
    for i, call in enumerate(calls):
        if is_end(call):
            return calls[: i + 1]
    raise SystemExit("the path does not reach its end: has a name changed that this script looks for?")


def since(calls: list[Call], is_start: Callable[[Call], bool]) -> list[Call]:
    return until(calls[::-1], is_start)[::-1]


def common(repeats: list[list[Call]]) -> Counter[Call]:
    """Return the calls that all repeats have: the path, without what ran beside it."""
    counters = [Counter(calls) for calls in repeats]
    least = counters[0]
    for counter in counters[1:]:
        least &= counter
    return least


def a_step(cluster: Served, repeats: int, few: int = 8, many: int = 40) -> Counter[Call]:
    """The calls of one more token."""
    low = common([cluster.complete(few) for _ in range(repeats)])
    high = common([cluster.complete(many) for _ in range(repeats)])
    share = {call: round((high[call] - low[call]) / (many - few)) for call in high}
    return Counter({call: num for call, num in share.items() if num > 0})


def show(title: str, calls: Counter[Call], verbose: bool) -> None:
    files = Counter[str]()
    for (path, _), num in calls.items():
        files[str(Path(path).relative_to(ROOT))] += num
    print(f"{title:60} {len(files):4} files {sum(files.values()):6} calls")
    if verbose:
        for name, num in sorted(files.items()):
            names = ", ".join(f"{f.rpartition('.')[2]}" for (p, f) in calls if p.endswith("/" + name))
            print(f"      {num:5} {name:48} {names[:160]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="name the files and functions of each path")
    parser.add_argument("--repeats", type=int, default=8, help="requests of each kind; a call counts if all have it")
    args = parser.parse_args()
    verbose, repeats = args.files, args.repeats
    trace = Trace()
    trace.install()
    with served(trace, "mixed") as cluster:
        whole = [cluster.complete(8) for _ in range(repeats)]
        to_kernel = [until(calls, lambda call: call[0].startswith(KERNELS)) for calls in whole]
        show("a request, from HTTP to the first kernel (one worker)", common(to_kernel), verbose)
        relay = Counter((path, "") for path in set[str]().union(*trace.relays.values()))
        show("of it, the relay", relay, verbose)
        show("a decode step, from the scheduler to HTTP", a_step(cluster, repeats), verbose)
        alone = common(whole)
    with served(trace, "prefill", "decode") as cluster:
        whole = [cluster.complete(8) for _ in range(repeats)]
        handed_off = common(whole)
        show("a request that is handed off, whole", handed_off, verbose)
        workers = Counter({call: num for call, num in (handed_off - alone).items() if "/workers/" in call[0]})
        show("of it, what the hand-off adds in workers", workers, verbose)
        leases = [_lease(calls) for calls in whole]
        show("a released lease, from the source's gRPC to its blocks", common(leases), verbose)


def _released(calls: list[Call]) -> list[Call]:
    """The calls from the release of a lease on."""
    return calls[next((i for i, call in enumerate(calls) if call[1].endswith(".Release")), len(calls)) :]


def _has_freed(calls: list[Call]) -> bool:
    return BLOCKS_FREE in _released(calls)


def _lease(calls: list[Call]) -> list[Call]:
    return until(_released(calls), lambda call: call == BLOCKS_FREE)


if __name__ == "__main__":
    main()
