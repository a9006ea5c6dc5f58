"""The dashboard with many live requests: work of the browser's main thread for each frame and update, and time of the
router's event loop for a snapshot.

    python -m benchmarks.serving.dashboard [--requests 1000] [--seconds 10]

Needs Debian's package `chromium`. The requests decode: every 50 ms each gets a token from a scripted worker, so that
all of them change between two snapshots. Times are those of the page's main thread, by a trace of the browser; without
a GPU, painting is done by other threads.
"""

import argparse
import asyncio
import json
import statistics
from contextlib import suppress
from typing import Any

from diptych.cluster.common.prediction import Level
from diptych.cluster.front.dashboard.snapshots import RouterIdentity, Snapshots
from diptych.cluster.routing.router import Router
from diptych.workers.common.errors import DiptychError
from diptych.workers.common.request import Request, SamplingParams
from tests.support.browser import Page, browsing
from tests.support.watched import WORD, NamedWorker, WatchedRouter, watched

STEP_S = 0.05
NUM_SNAPSHOTS = 5
MAIN_THREAD = "CrRendererMain"
TASK = "RunTask"
CATEGORIES = "toplevel,devtools.timeline,disabled-by-default-devtools.timeline,blink.user_timing"
RENDERING = {"UpdateLayoutTree", "Layout", "PrePaint", "Paint", "Layerize", "Commit"}
WARM_S = 4.0
PROMPT = tuple(range(3, 40))


async def hold(router: Router, number: int) -> None:
    """Be the client of a request that decodes until it is cancelled."""
    sampling = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)
    request = Request(f"chatcmpl-{number:032x}-0", PROMPT, sampling, timeout_s=600.0)
    with suppress(DiptychError):  # the router ends with it
        async for _ in router.stream(request):
            pass


class Steps:
    """Tokens for all requests of the workers, one a step, as the router has placed them."""

    def __init__(self, workers: list[NamedWorker]) -> None:
        self._decoding: list[tuple[NamedWorker, int, int]] = []  # worker, handle, position of its next token
        self.tasks = [asyncio.create_task(self._accept(worker)) for worker in workers]
        self.tasks.append(asyncio.create_task(self._run()))

    async def _accept(self, worker: NamedWorker) -> None:
        while True:
            message = await worker.received.get()
            submit = message.submit
            if not message.HasField("submit"):  # the end of one
                continue
            if submit.HasField("offer"):
                worker.first_token(submit.handle)
            elif submit.HasField("source"):
                worker.pulled_tokens(submit.handle, 1)
                self._decoding.append((worker, submit.handle, 2))
            else:
                worker.first_token(submit.handle)
                self._decoding.append((worker, submit.handle, 1))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            for worker, handle, position in self._decoding:
                worker.tokens(handle, [WORD], start=position)
            self._decoding = [(worker, handle, position + 1) for worker, handle, position in self._decoding]


def trace(page: Page, seconds: float) -> list[dict[str, Any]]:
    """Events of the browser in that time."""
    page.tools.call("Tracing.start", categories=CATEGORIES, transferMode="ReportEvents")
    wait = f"new Promise(r => setTimeout(r, {1000 * seconds}))"
    page.tools.call("Runtime.evaluate", expression=wait, awaitPromise=True)
    page.tools.call("Tracing.end")
    while not any(event["method"] == "Tracing.tracingComplete" for event in page.tools.events):
        page.tools.call("Browser.getVersion")
    collected = [e["params"]["value"] for e in page.tools.events if e["method"] == "Tracing.dataCollected"]
    return [event for part in collected for event in part]


def report(events: list[dict[str, Any]], seconds: float) -> dict[str, float]:
    """Milliseconds on the page's main thread: of CPU, and of wall time, in which other processes ran too."""
    updates = [e for e in events if e.get("name") == "dashboard-update" and e["ph"] == "b"]
    pid = updates[0]["pid"]
    main = next(e["tid"] for e in events if e.get("name") == "thread_name" and _is_main(e, pid))
    own = [e for e in events if e.get("ph") == "X" and e["pid"] == pid and e["tid"] == main]
    tasks = [e for e in own if e["name"] == TASK]
    updating = [t for t in tasks if any(t["ts"] <= u["ts"] <= t["ts"] + t["dur"] for u in updates)]
    drawing = [e for e in own if e["name"] in RENDERING]
    cpu = sorted(_cpu_ms(task) for task in tasks)
    return {
        "updates": len(updates),
        "update_cpu_ms_median": statistics.median(map(_cpu_ms, updating)),
        "update_cpu_ms_max": max(map(_cpu_ms, updating)),
        "task_cpu_ms_p99": cpu[int(0.99 * len(cpu))],
        "task_cpu_ms_max": cpu[-1],
        "task_wall_ms_max": max(task["dur"] for task in tasks) / 1000,
        "frames": sum(e["name"] == "Commit" for e in own),
        "layout_and_paint_cpu_ms_a_frame": sum(map(_cpu_ms, drawing)) / max(sum(e["name"] == "Commit" for e in own), 1),
        "busy_share": sum(cpu) / 1000 / seconds,
    }


def _is_main(event: dict[str, Any], pid: int) -> bool:
    return event["pid"] == pid and event["args"]["name"] == MAIN_THREAD


def _cpu_ms(event: dict[str, Any]) -> float:
    return event.get("tdur", event["dur"]) / 1000


async def snapshot_ms(router: Router) -> float:
    """Least milliseconds of the event loop's CPU for one snapshot, after the first."""
    snapshots, found = Snapshots(router, Level(1.0, 0.1), RouterIdentity.here()), list[float]()
    for _ in range(NUM_SNAPSHOTS):
        snapshots._next_at = 0.0
        await snapshots.newest()
        found.append(1000 * snapshots._busy_s)
    return min(found[1:])


def measure(router: WatchedRouter, num_requests: int, seconds: float) -> dict[str, Any]:
    inner: Router = router.process.router  # not over HTTP: a thousand clients would need the cores
    tasks: list[asyncio.Task[None]] = []

    def begin() -> None:
        tasks.extend(Steps(router.workers).tasks)
        tasks.extend(asyncio.create_task(hold(inner, number)) for number in range(num_requests))

    router.do(begin)
    with browsing(1400, 900) as page:
        page.open(f"{router.url}/dashboard")
        page.until_text(".chips", f"decode {num_requests}")
        page.run(f"new Promise(r => setTimeout(r, {1000 * WARM_S}))")
        page.errors()
        found = report(trace(page, seconds), seconds)
        num_errors = len(page.errors())
        found["router_cpu_ms_a_snapshot"] = router.call(snapshot_ms(inner))
        page.open("about:blank")
    router.do(lambda: [task.cancel() for task in tasks])
    return found | {"num_errors": num_errors}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    with watched(max_requests=2 * args.requests) as router:
        print(json.dumps(measure(router, args.requests, args.seconds), indent=1))


if __name__ == "__main__":
    main()
