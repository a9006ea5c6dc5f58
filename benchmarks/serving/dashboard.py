"""The dashboard with many live requests: work of the browser's main thread for each frame and update, and time of the
router's event loop for a snapshot.

    python -m benchmarks.serving.dashboard [--requests 1000] [--seconds 10]

Needs Debian's package `chromium`. The requests decode: every 50 ms each gets a token from a scripted worker, so that
all of them change between two snapshots. Times are those of the page's main thread, by a trace of the browser; without a
GPU, painting is done by other threads.
"""

import argparse
import asyncio
import json
import statistics
from typing import Any

from diptych.cluster.routing.router import Router
from diptych.workers.common.request import Request, SamplingParams
from tests.support.browser import Page, browsing
from tests.support.watched import WORD, NamedWorker, WatchedRouter, watched

STEP_S = 0.05
MAIN_THREAD = "CrRendererMain"
TASK = "RunTask"
CATEGORIES = "toplevel,devtools.timeline,blink.user_timing"
RENDERING = {"UpdateLayoutTree", "Layout", "PrePaint", "Paint", "Layerize", "Commit"}
WARM_S = 4.0
PROMPT = tuple(range(3, 40))


async def hold(router: Router, number: int) -> None:
    """Be the client of a request that decodes until it is cancelled."""
    sampling = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)
    request = Request(f"chatcmpl-{number:032x}-0", PROMPT, sampling, timeout_s=600.0)
    async for _ in router.stream(request):
        pass


async def step(workers: list[NamedWorker], num_requests: int) -> None:
    """Make tokens for all requests, one a step, until cancelled."""
    prefill, decode = workers
    sinks = list[int]()
    for worker in workers:
        for _ in range(num_requests):
            handle = (await worker.submitted()).handle
            if worker is prefill:
                prefill.first_token(handle)
            else:
                sinks.append(handle)
    for handle in sinks:
        decode.pulled_tokens(handle, 1)
    position = 2
    while True:
        await asyncio.sleep(STEP_S)
        for handle in sinks:
            decode.tokens(handle, [WORD], start=position)
        position += 1


def trace(page: Page, seconds: float) -> list[dict[str, Any]]:
    """Events of the browser in that time."""
    page.tools.events.clear()
    page.tools.call("Tracing.start", categories=CATEGORIES, transferMode="ReportEvents")
    wait = f"new Promise(r => setTimeout(r, {1000 * seconds}))"
    page.tools.call("Runtime.evaluate", expression=wait, awaitPromise=True)
    page.tools.call("Tracing.end")
    while not any(event["method"] == "Tracing.tracingComplete" for event in page.tools.events):
        page.tools.call("Browser.getVersion")
    collected = [e["params"]["value"] for e in page.tools.events if e["method"] == "Tracing.dataCollected"]
    return [event for part in collected for event in part]


def report(events: list[dict[str, Any]], seconds: float) -> dict[str, float]:
    """Milliseconds on the main thread of the page."""
    named = [e for e in events if e.get("name") == "thread_name" and e["args"]["name"] == MAIN_THREAD]
    updates = [e for e in events if e.get("name") == "dashboard-update"]
    pids = {e["pid"] for e in updates}
    mains = {(e["pid"], e["tid"]) for e in named if e["pid"] in pids}
    own = [e for e in events if e.get("ph") == "X" and (e["pid"], e["tid"]) in mains]
    tasks = sorted(e["dur"] / 1000 for e in own if e["name"].endswith(TASK))
    begins = {e["id2"]["local"] if "id2" in e else e["id"]: e["ts"] for e in updates if e["ph"] == "b"}
    ends = {e["id2"]["local"] if "id2" in e else e["id"]: e["ts"] for e in updates if e["ph"] == "e"}
    scripts = [(ends[key] - begin) / 1000 for key, begin in begins.items() if key in ends]
    rendering = [e["dur"] / 1000 for e in own if e["name"] in RENDERING]
    return {
        "updates": len(scripts),
        "update_ms_median": statistics.median(scripts),
        "update_ms_max": max(scripts),
        "task_ms_p99": tasks[int(0.99 * len(tasks))],
        "task_ms_max": tasks[-1],
        "rendering_ms_a_s": sum(rendering) / seconds,
        "busy_share": sum(tasks) / 1000 / seconds,
    }


def measure(router: WatchedRouter, num_requests: int, seconds: float) -> dict[str, Any]:
    inner: Router = router.process._router  # not over HTTP: a thousand clients would need the cores
    tasks: list[asyncio.Task[None]] = []

    def begin() -> None:
        tasks.append(asyncio.create_task(step(router.workers, num_requests)))
        tasks.extend(asyncio.create_task(hold(inner, number)) for number in range(num_requests))

    router.do(begin)
    with browsing(1400, 900) as page:
        page.open(f"{router.url}/dashboard")
        page.until_text(".chips", f"decode {num_requests}")
        page.run(f"new Promise(r => setTimeout(r, {1000 * WARM_S}))")
        found = report(trace(page, seconds), seconds)
        errors = page.errors()
        page.open("about:blank")
    router.do(lambda: [task.cancel() for task in tasks])
    return found | {"num_errors": len(errors)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    with watched(max_requests=2 * args.requests) as router:
        print(json.dumps(measure(router, args.requests, args.seconds), indent=1))


if __name__ == "__main__":
    main()
