"""A worker with NIXL, on every interface. A line on standard input is answered with whether its KV is intact."""

import asyncio
import json
import os
import sys

from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.server.service import WorkerService
from diptych.workers.testing.fake_runner import FakeRunner
from diptych.workers.transport.nixl import NixlTransport


async def main() -> None:
    config = WorkerConfig.of(
        model="fake", host="0.0.0.0", auth_token="the cluster's token", transports=("nixl", "grpc")
    )
    runner = FakeRunner(num_blocks=4096)
    view = runner.memory.region.view
    assert view is not None
    service = WorkerService(config, runner)
    where = await service.start()
    nixl = service._transports["nixl"]
    assert isinstance(nixl, NixlTransport)
    nixl.serve(1)  # as while a hand-off is open
    port = int(where.address.rpartition(":")[2])
    endpoint = nixl.endpoint().SerializeToString().hex()
    print(json.dumps({"pid": os.getpid(), "port": port, "endpoint": endpoint}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print("intact" if not any(view) else "written to", flush=True)
    await service.stop()


asyncio.run(main())
