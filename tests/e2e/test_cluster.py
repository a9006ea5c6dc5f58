"""One cluster, as a person has it: snippets, status, resizing under load, killing under load, and its end."""

import asyncio
import json
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file

from diptych.cluster.preflight.checks import resolve_model
from diptych.workers.common.cores import cores_to_serve, usable_cores

from ..support.cluster_harness import END_S, MODEL, Served, diptych, environment, load, survivors, wait_until
from ..support.connections import between, can_cut, cut, has_joined

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]


@pytest.fixture
def served(running: Callable[[], Served]) -> Served:
    return running()


def workers(status: dict[str, Any], pool: str | None = None) -> dict[str, dict[str, Any]]:
    return {w["worker_id"]: w for w in status["workers"] if pool in (None, w["pool"])}


def processes(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid)] if psutil.pid_exists(pid) else []


def count(served: Served, metric: str) -> float:
    lines = httpx.get(f"{served.http_address}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == metric)


async def command(served: Served, *args: str) -> "subprocess.CompletedProcess[str]":
    return await asyncio.to_thread(diptych, served.home, *args)


def test_the_curl_snippet_works(served: Served) -> None:
    run = subprocess.run(["bash", "-c", served.snippet("curl") + " -sS"], capture_output=True, text=True, check=True)
    answer = json.loads(run.stdout)
    assert answer["usage"]["completion_tokens"] > 0
    assert answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("title", ["Python, openai", "Python, gRPC"])
def test_the_python_snippets_work(served: Served, title: str) -> None:
    code = served.snippet(title)
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, env=environment(served.home), check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


def test_each_worker_computes_on_its_own_cores(served: Served) -> None:
    everywhere = os.sched_getaffinity(0)
    bound: list[int] = []
    for worker in workers(served.status()).values():
        cores = worker["cores"] or []
        serving = set(cores_to_serve(cores, usable_cores(), worker["role"]) or everywhere)
        assert os.sched_getaffinity(worker["pid"]) == everywhere, "Ray's threads float"
        threads = [os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{worker['pid']}/task").iterdir()]
        own = set[int]().union(*(affinity for affinity in threads if affinity not in (everywhere, serving)))
        assert serving in threads, "the event loop's, and those that it starts"
        if serving == set(cores):
            own |= serving
        assert own <= set(cores) and set(cores[:1]) <= own, "as it says; the engine has the first"
        bound += own
    assert len(bound) == len(set(bound)), "no core is two workers'"
    # Another cluster may hold some cores during this test; if not, each of the two workers has a core.
    assert bound or len(everywhere) == 1


def test_each_process_writes_its_log_as_objects(served: Served) -> None:
    status = served.status()
    pids = {"supervisor": [status["supervisor_pid"]]}
    pids |= {kind: [each["pid"] for each in status[f"{kind}s"]] for kind in ("router", "worker")}
    for kind, pid in ((kind, pid) for kind, found in pids.items() for pid in found):
        written = Path(f"/proc/{pid}/fd/2").resolve().read_text().splitlines()
        lines = [json.loads(line) for line in written if line.startswith("{")]
        assert {(line["process"], line["pid"]) for line in lines} == {(kind, pid)}, written


def test_status_shows_every_pool_worker_and_router(served: Served) -> None:
    status = served.status()
    assert status["state"] == "ready"
    assert sorted((w["pool"], w["role"], w["phase"]) for w in status["workers"]) == [
        ("decode", "decode", "ready"),
        ("prefill", "prefill", "ready"),
    ]
    assert all(w["num_blocks"] > 0 for w in status["workers"])
    table = diptych(served.home, "status").stdout
    for worker in status["workers"]:
        assert worker["worker_id"] in table
        assert worker["address"] in table
    assert f"127.0.0.1:{status['routers'][0]['http_port']}" in table
    experts = diptych(served.home, "experts")
    assert experts.returncode == 2 and "no worker counts tokens per expert" in experts.stderr


def test_nothing_listens_but_on_loopback_and_secrets_are_the_owners(served: Served) -> None:
    pids = {p.pid for p in served.family()}
    hosts = {c.laddr.ip for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN and c.pid in pids}
    assert hosts <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    files = list(served.home.glob("default.*"))
    assert {file.suffix for file in files} == {".json", ".token", ".lock"}
    assert {stat.S_IMODE(f.stat().st_mode) for f in files} == {0o600}


def test_a_second_cluster_of_the_same_name_is_refused(served: Served) -> None:
    run = diptych(served.home, "serve", MODEL, "--http-port", "0", "--grpc-port", "0")
    assert run.returncode == 2
    assert "already runs" in run.stderr


async def num_computed(served: Served) -> dict[str, int]:
    """Tokens that each worker has computed."""
    found = workers(await asyncio.to_thread(served.status))
    return {i: w["num_prefill_tokens"] + w["num_decode_tokens"] for i, w in found.items()}


async def test_pools_grow_and_shrink_under_load_and_no_request_fails(served: Served) -> None:
    """Nor is one resumed: a planned change takes nothing from anybody. Every worker takes its share."""
    num_resumes = count(served, "diptych_request_resumes_total")
    async with load(served.grpc_address) as result:
        await result.until_done(6)
        grown = await command(served, "scale", "prefill=2", "decode=2")
        assert grown.returncode == 0, grown.stderr
        assert "prefill: 2 of 2 ready" in grown.stdout
        before = after = await num_computed(served)
        async with asyncio.timeout(END_S):  # new workers join routers, and compute their first steps, when they can
            while not all(after[i] > before[i] for i in after):
                await result.until_done(6)
                after = await num_computed(served)
        assert set(before) == set(after)
        shrunk = await command(served, "scale", "prefill=1", "decode=1")
        assert shrunk.returncode == 0, shrunk.stderr
        await result.until_done(12)
    assert not result.errors
    assert count(served, "diptych_request_resumes_total") == num_resumes
    assert len(workers(served.status())) == 2


@pytest.mark.parametrize("pool", [pytest.param("prefill", marks=pytest.mark.long), "decode"])
async def test_a_killed_worker_is_replaced_and_no_request_fails(served: Served, pool: str) -> None:
    async with load(served.grpc_address) as result:
        await result.until_done(6)
        [victim] = workers(await asyncio.to_thread(served.status), pool).values()
        os.kill(victim["pid"], signal.SIGKILL)
        await result.until_done(18)
        scaled = await command(served, "scale", f"{pool}=1")  # returns once the pool is there
        assert scaled.returncode == 0, scaled.stderr
        [successor] = workers(await asyncio.to_thread(served.status), pool).values()
        assert successor["pid"] != victim["pid"]
    assert not result.errors


async def test_connections_that_break_end_no_process_and_no_request(served: Served) -> None:
    """All between the cluster's processes, Ray's included, three times."""
    if not can_cut():
        pytest.skip("this user, or this kernel, cannot break connections of others")
    before = await asyncio.to_thread(served.status)
    fronts = {before["routers"][0][port] for port in ("http_port", "grpc_port")}
    async with load(served.grpc_address) as result:
        for _ in range(3):
            await result.until_done(6)
            broken = between(served.family(), without=fronts)
            assert len(broken) >= 2, "those of the router to both workers at least"
            cut(broken)
            assert not broken & between(served.family(), without=fronts)
        await result.until_done(12)
    assert not result.errors
    supervisor, pids = before["supervisor_pid"], {each["pid"] for each in before["workers"]}
    await asyncio.to_thread(wait_until, lambda: has_joined(supervisor, pids), END_S)
    after = await asyncio.to_thread(served.status)
    for kind in ("workers", "routers"):
        assert [each["pid"] for each in after[kind]] == [each["pid"] for each in before[kind]]
    assert after["supervisor_pid"] == supervisor
    await asyncio.to_thread(served.assert_nothing_is_held)


async def test_the_supervisor_comes_back_and_requests_go_on_meanwhile(served: Served) -> None:
    status = await asyncio.to_thread(served.status)
    async with load(served.grpc_address) as result:
        await result.until_done(6)
        os.kill(status["supervisor_pid"], signal.SIGKILL)
        await result.until_done(12)
        after = await asyncio.to_thread(served.status)
        assert after["supervisor_pid"] != status["supervisor_pid"]
        assert {w["pid"] for w in after["workers"]} == {w["pid"] for w in status["workers"]}
    assert not result.errors


async def test_requests_go_on_while_rays_gcs_is_dead_and_supervision_after(served: Served) -> None:
    """A supervisor that dies with it finds the same workers by what the GCS has kept."""
    status = await asyncio.to_thread(served.status)
    [gcs] = [process for process in served.family() if process.name() == "gcs_server"]
    async with load(served.grpc_address) as result:
        await result.until_done(6)
        result.forget_gaps()
        gcs.kill()
        os.kill(status["supervisor_pid"], signal.SIGKILL)
        await result.until_done(12)
        after = await asyncio.to_thread(served.status)
        await result.until_done(6)
    assert not result.errors
    assert after["supervisor_pid"] != status["supervisor_pid"]
    assert {(w["worker_id"], w["pid"], w["address"]) for w in after["workers"]} == {
        (w["worker_id"], w["pid"], w["address"]) for w in status["workers"]
    }
    grown = await command(served, "scale", "decode=2")
    assert grown.returncode == 0, grown.stderr
    assert (await command(served, "scale", "decode=1")).returncode == 0
    print(f"longest gap of an answer: {result.longest_gap_s:.3f} s; of all: {result.longest_silence_s:.3f} s")


def other_weights(folder: Path, factor: float) -> Path:
    """The model with its last norm's weights times `factor`."""
    shutil.copytree(resolve_model(MODEL), folder)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    save_file({name: t * factor if name == "model.norm.weight" else t for name, t in tensors.items()}, file)
    return folder


async def test_other_weights_are_served_without_a_failed_request_and_damaged_ones_never(
    served: Served, tmp_path: Path
) -> None:
    before = await asyncio.to_thread(served.status)
    async with load(served.grpc_address) as result:
        await result.until_done(6)
        result.forget_gaps()
        damaged = await command(served, "upgrade", str(other_weights(tmp_path / "damaged", math.nan)))
        assert damaged.returncode == 4, damaged.stderr
        assert "log-probabilities that are no numbers" in damaged.stdout
        still = await asyncio.to_thread(served.status)
        assert {w["pid"] for w in still["workers"]} == {w["pid"] for w in before["workers"]}
        await result.until_done(6)
        began = time.monotonic()
        better = await command(served, "upgrade", str(other_weights(tmp_path / "better", 1.5)))
        took_s = time.monotonic() - began
        assert better.returncode == 0, better.stdout + better.stderr
        assert better.stdout.splitlines()[-1] == "upgrade: done, 2 of 2 workers have the new settings"
        await result.until_done(6)
    assert not result.errors
    after = await asyncio.to_thread(served.status)
    assert not {w["pid"] for w in after["workers"]} & {w["pid"] for w in before["workers"]}
    assert (after["model"], after["upgrade"]["phase"]) == (str(tmp_path / "better"), "done")
    assert httpx.get(f"{served.http_address}/v1/models").json()["data"][0]["id"] == MODEL, "its name is the same"
    print(f"upgrade: {took_s:.1f} s; longest gap {result.longest_gap_s:.3f} s, of all {result.longest_silence_s:.3f} s")


def test_a_killed_router_listens_again_where_it_did(served: Served) -> None:
    before = served.status()["routers"][0]
    os.kill(before["pid"], signal.SIGKILL)
    psutil.wait_procs(processes(before["pid"]))
    after = before
    while after["pid"] == before["pid"] or after["phase"] != "ready":
        after = served.status()["routers"][0]
    assert (after["http_port"], after["grpc_port"]) == (before["http_port"], before["grpc_port"])
    assert (
        subprocess.run(["bash", "-c", served.snippet("curl") + " -sSf"], capture_output=True, check=False).returncode
        == 0
    )


async def test_a_supervisor_that_hangs_is_started_again_and_ends_nothing(served: Served) -> None:
    """The command stays, the workers stay, no request fails."""
    status = await asyncio.to_thread(served.status)
    async with load(served.grpc_address) as result:
        await result.until_done(6)
        os.kill(status["supervisor_pid"], signal.SIGSTOP)
        await asyncio.to_thread(served.wait_for, "it is started again; requests go on")
        await result.until_done(6)
        after = await asyncio.to_thread(served.status)
        assert after["supervisor_pid"] != status["supervisor_pid"]
        assert {w["pid"] for w in after["workers"]} == {w["pid"] for w in status["workers"]}
    assert not result.errors
    assert not survivors(processes(status["supervisor_pid"]))
    assert served.process.poll() is None


def test_a_router_that_hangs_is_replaced_where_it_listened(served: Served) -> None:
    before = after = served.status()["routers"][0]
    os.kill(before["pid"], signal.SIGSTOP)
    while after["pid"] == before["pid"] or after["phase"] != "ready":
        after = served.status()["routers"][0]
    assert "it did not answer for" in after["last_error"]
    assert (after["http_port"], after["grpc_port"]) == (before["http_port"], before["grpc_port"])
    assert not survivors(processes(before["pid"]))
    subprocess.run(["bash", "-c", served.snippet("curl") + " -sSf"], capture_output=True, check=True)


def test_stop_from_another_terminal_leaves_no_process_and_no_file(served: Served) -> None:
    """The last of them, for it ends the cluster: one after it would have to start another."""
    family = served.family()
    assert len(family) > 5
    served.close()  # a process that has joined a Ray keeps a core busy once that has ended
    run = diptych(served.home, "stop")
    assert run.returncode == 0, run.stderr
    assert served.process.wait(END_S) == 0
    assert not survivors(family)
    assert not list(served.home.iterdir())
