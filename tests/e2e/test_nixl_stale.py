"""Remains of an ended NIXL source (its metadata and connections) neither block nor crash the sink."""

import signal

import pytest

from diptych.proto import kv_pb2, kv_pb2_grpc
from diptych.workers.common.channel import open_channel
from diptych.workers.common.errors import TransportError
from diptych.workers.kv.layout import Copies
from diptych.workers.transport.base import KVReader, Source
from diptych.workers.transport.machine import this_machine
from diptych.workers.transport.nixl import NixlTransport

from ..support.handoff_pair import LARGE, make_memory
from .test_handoff_processes import NUM_BLOCKS, SourceProcess, check, source_process

pytestmark = pytest.mark.e2e

MEMORY = make_memory(LARGE, NUM_BLOCKS)


async def opened_by(source: SourceProcess) -> kv_pb2.Opened:
    request = kv_pb2.SubscribeRequest(
        handoff_id="h0",
        source_incarnation=source.incarnation,
        sink_incarnation="sink/1",
        layout=LARGE.to_proto(),
        transports=["nixl"],
        machine=this_machine(),
    )
    async with open_channel(source.address) as channel:
        call = kv_pb2_grpc.KVHandoffStub(channel).Subscribe(request)
        opened = (await call.read()).opened
        call.cancel()
    return opened


async def connect(transport: NixlTransport, opened: kv_pb2.Opened) -> KVReader:
    return await transport.connect(Source("h0", "sink/1", opened, stub=None))  # type: ignore[arg-type]


async def read_all(reader: KVReader) -> None:
    runs = MEMORY.runs(range(NUM_BLOCKS), 0, LARGE.num_layers)
    await reader.read(kv_pb2.Segment(), Copies.of(runs, runs), MEMORY.region)


@pytest.mark.parametrize("is_known", [False, True], ids=["first seen when dead", "died while connected"])
async def test_stale_metadata_is_an_error_and_the_successor_is_read(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.workers.transport.tracked_reader.READ_TIMEOUT_S", 2.0)
    monkeypatch.setattr("diptych.workers.transport.tracked_reader.SETTLE_S", 0.1)
    transport = NixlTransport([MEMORY.region])
    reader: KVReader | None = None
    try:
        async with source_process("nixl", seed=1) as source:
            opened = await opened_by(source)
            if is_known:
                reader = await connect(transport, opened)
                await read_all(reader)
            source.signal(signal.SIGKILL)
        with pytest.raises(TransportError):
            reader = await connect(transport, opened)
            await read_all(reader)
        if reader is not None:
            await reader.settled()
        transport.forget(opened.source_incarnation)
        async with source_process("nixl", seed=2) as successor:
            await read_all(await connect(transport, await opened_by(successor)))
            check(MEMORY, successor, tuple(range(NUM_BLOCKS)))
    finally:
        await transport.close()
