"""What `diptych status` shows of a cluster, for a person and for a script."""

import asyncio
from dataclasses import replace

import pytest
from rich.console import Console

from diptych.cluster.cli.status_view import render
from diptych.cluster.common.handles import WorkerStarted
from diptych.cluster.control.status import ClusterStatus, DraftStatus, TransferStatus, WorkerStatus
from diptych.cluster.control.worker_control import WorkerControl
from diptych.cluster.control.worker_record import WorkerRecord
from diptych.proto.worker_pb2 import DraftCounts, PeerLink

from ...support.scripted_worker import scripted

LINKS = (
    TransferStatus("decode-1", "prefill-2", "nixl", 3_000_000_000, 0.5, 40, 0),
    TransferStatus("decode-1", "prefill-1", "grpc", 250_000_000, 0.25, 7, 2),
    TransferStatus("decode-0", "gone", "", 0, 0.0, 0, 1),
)


def shown(status: ClusterStatus) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(status))
    return [line.split() for line in capture.get().splitlines()]


def status(*links: TransferStatus) -> ClusterStatus:
    return ClusterStatus("default", "tiny", 1, (), (), (), links=links)


def test_links_are_a_table() -> None:
    lines = shown(status(*LINKS))
    head = lines.index(["sink", "source", "transport", "GB", "GB/s", "reads", "failed", "pulls"])
    assert lines[head + 1 : head + 4] == [
        ["decode-0", "<-", "gone", "0.000", "0.00", "0", "1"],
        ["decode-1", "<-", "prefill-1", "grpc", "0.250", "1.00", "7", "2"],
        ["decode-1", "<-", "prefill-2", "nixl", "3.000", "6.00", "40", "0"],
    ]
    assert not any("sink" in line for line in shown(status()))


def test_links_are_json() -> None:
    first, _, last = status(*LINKS).to_json()["links"]
    assert first == {
        "sink": "decode-1",
        "source": "prefill-2",
        "transport": "nixl",
        "num_bytes": 3_000_000_000,
        "read_s": 0.5,
        "num_reads": 40,
        "num_failed": 0,
        "bytes_per_s": 6_000_000_000,
    }
    assert last["bytes_per_s"] == 0


def test_a_workers_machines_are_all_shown() -> None:
    spread = WorkerStatus("decode-0", "decode", "decode", "ready", 1.0, node="n1", rank_host_nodes=("n2", "n3"))
    other = WorkerStatus("decode-1", "decode", "decode", "ready", 1.0, node="n4")
    cluster = ClusterStatus("default", "tiny", 1, (), (spread, other, replace(spread, node=None)), ())
    lines = [" ".join(line) for line in shown(cluster)]
    assert any("ready 1s n1, n2, n3 0" in line for line in lines) and any("ready 1s n4 0" in line for line in lines)
    found = cluster.to_json()["workers"][0]
    assert (found["node"], found["rank_host_nodes"]) == ("n1", ("n2", "n3"))


def test_acceptance_of_a_worker_that_speculates_is_shown() -> None:
    drafts = (DraftStatus("ngram", 60, 40), DraftStatus("suffix", 40, 31))
    speculating = WorkerStatus("decode-0", "decode", "decode", "ready", 1.0, drafts=drafts, draft_yields=(6, 0, 4, 5))
    speculating = replace(speculating, num_draft_tokens_anew=96, num_draft_failures=3, is_draft_off=True)
    plain = WorkerStatus("decode-1", "decode", "decode", "ready", 1.0)
    failing = replace(plain, worker_id="decode-2", num_draft_failures=1)
    cluster = ClusterStatus("default", "tiny", 1, (), (speculating, plain, failing), ())
    lines = [" ".join(line) for line in shown(cluster)]
    assert [line for line in lines if "draft" in line] == [
        "decode-0: 71% of the drafted tokens accepted, 2.5 tokens a step",
        "decode-0: its draft computed 96 tokens later than the model",
        "decode-0: its draft failed 3 times and is off until the worker ends; its log says why",
        "decode-2: its draft failed 1 time and goes on; its log says why",
    ]
    found, without, _ = cluster.to_json()["workers"]
    assert found["drafts"][0] == {"method": "ngram", "num_drafted": 60, "num_accepted": 40}
    assert (found["draft_yields"], without["drafts"], without["draft_yields"]) == ((6, 0, 4, 5), (), ())
    assert (found["num_draft_tokens_anew"], without["num_draft_tokens_anew"]) == (96, 0)
    assert (found["num_draft_failures"], found["is_draft_off"], without["num_draft_failures"]) == (3, True, 0)


async def test_a_supervisor_hears_of_drafts_that_are_possible() -> None:
    async with scripted("decode") as (worker,):
        control = WorkerControl(worker.info.address, None)
        record = WorkerRecord("decode-0", "decode", control=control)
        while not control.num_received:  # the hello
            await asyncio.sleep(0.002)
        counts = DraftCounts(method="ngram", num_drafted=4, num_accepted=3)
        worker.load(num_running=1, drafts=[counts], draft_yields=[1], num_draft_tokens_anew=7, is_draft_off=True)
        while not control.load.num_running:
            await asyncio.sleep(0.002)
        seen = record.status(now=0.0)
        assert (seen.drafts, seen.draft_yields) == ((DraftStatus("ngram", 4, 3),), (1,))
        assert (seen.num_draft_tokens_anew, seen.is_draft_off) == (7, True)
        num_received = control.num_received
        worker.load(num_running=9, drafts=[DraftCounts(method="ngram", num_drafted=4, num_accepted=5)])
        while control.num_received == num_received:
            await asyncio.sleep(0.002)
        assert record.status(now=0.0) == seen
        await control.close()


async def test_a_supervisor_hears_of_links_and_names_their_workers(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted("decode") as (worker,):
        control = WorkerControl(worker.info.address, None)
        while not control.num_received:  # the hello
            await asyncio.sleep(0.002)
        started = WorkerStarted(worker.info.address, worker.incarnation, 1, "node")
        record = WorkerRecord("decode-0", "decode", started=started, control=control)
        assert record.transfers({}) == []
        known = PeerLink(incarnation="uuid-1", transport="nixl", num_bytes=80, read_s=2, num_reads=3, num_failed=1)
        worker.load(num_running=1, links=[known, PeerLink(incarnation="uuid-2")])
        while not control.load.num_running:
            await asyncio.sleep(0.002)
        assert record.transfers({"uuid-1": "prefill-4"}) == [
            TransferStatus("decode-0", "prefill-4", "nixl", 80, 2.0, 3, 1),
            TransferStatus("decode-0", "uuid-2", "", 0, 0.0, 0, 0),
        ]
        num_received = control.num_received
        worker.load(num_running=9, links=[PeerLink(incarnation="uuid-3", read_s=-1)])
        while control.num_received == num_received:
            await asyncio.sleep(0.002)
        assert control.load.num_running == 1 and len(record.transfers({})) == 2
        await control.close()
    assert "is dropped" in caplog.text
