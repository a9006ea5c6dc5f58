"""Process that reads from a pool over NIXL until it is killed; test_nixl_killed.py starts it.

python -m tests.support.nixl_reading ENDPOINT      a message in hexadecimal
"""

import sys

import numpy as np

from diptych.proto import kv_pb2
from diptych.workers.kv.layout import Copies
from diptych.workers.transport.nixl_agent import Endpoint
from diptych.workers.transport.nixl_thread import NixlThread

from .handoff_pair import SMALL, make_memory


def main(endpoint: str) -> None:
    own = make_memory(SMALL, 64).region
    agent = NixlThread([own], has_rdma=False)
    agent.connect("source", [Endpoint.from_proto(kv_pb2.NixlEndpoint.FromString(bytes.fromhex(endpoint)))]).result()
    print("connected", flush=True)
    starts = np.arange(0, own.num_bytes, 1024)
    while True:
        agent.read("source", 0, Copies(starts, starts, np.full(len(starts), 512))).result()


if __name__ == "__main__":
    main(sys.argv[1])
