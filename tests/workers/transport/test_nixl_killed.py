"""A source whose sinks are killed while they connect to it over NIXL."""

import random
import subprocess
import sys
import time

import pytest

from diptych.workers.transport.nixl_thread import NixlThread

from ...support import nixl_reading
from ...support.handoff_pair import SMALL, make_memory

NUM_ROUNDS = 40  # before UCX was kept from looking at its peers, one in 22 ended the source


@pytest.mark.long
def test_a_source_outlives_sinks_that_are_killed_while_they_connect() -> None:
    source, moments = NixlThread([make_memory(SMALL, 64).region], has_rdma=False), random.Random(5)
    source.serve(True)
    command = [sys.executable, "-m", nixl_reading.__name__, source.endpoint.to_proto().SerializeToString().hex()]
    for _ in range(NUM_ROUNDS):
        sinks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for sink in sinks:
            assert sink.stdout is not None and sink.stdout.readline() == "connected\n"
        time.sleep(moments.random() * 0.004)  # any of these moments will do
        for sink in sinks:
            sink.kill()
            sink.communicate()
    source.stop()
