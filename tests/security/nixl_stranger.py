"""Writes into a worker's KV by its NIXL endpoint, in hex the first argument, as the user who is the second one, by the
transports of UCX that are the third. Says "wrote", or why not."""

import ctypes
import os
import sys
import time

NUM_BYTES = 4096
PATIENCE_S = 5.0

os.environ |= {
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_TLS": sys.argv[3],
    "UCX_POSIX_ERROR_HANDLING": "y",
    "UCX_SYSV_ERROR_HANDLING": "y",
}
from nixl import _api  # noqa: E402

from diptych.proto import kv_pb2  # noqa: E402

endpoint = kv_pb2.NixlEndpoint.FromString(bytes.fromhex(sys.argv[1]))
user = int(sys.argv[2])
agent = _api.nixl_agent("stranger", _api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
buffer = ctypes.create_string_buffer(b"\xab" * NUM_BYTES, NUM_BYTES)
own = [(ctypes.addressof(buffer), NUM_BYTES, 0)]
agent.register_memory([(*own[0], "")], "DRAM")
if user:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
try:
    agent.add_remote_agent(endpoint.metadata)
    local = agent.get_xfer_descs(own, "DRAM")
    remote = agent.get_xfer_descs([(endpoint.base_address, NUM_BYTES, 0)], "DRAM")
    transfer = agent.initialize_xfer("WRITE", local, remote, endpoint.agent_name)
    state, until = agent.transfer(transfer), time.monotonic() + PATIENCE_S
    while state == "PROC" and time.monotonic() < until:
        state = agent.check_xfer_state(transfer)
    print("wrote" if state == "DONE" else f"refused: {state}", flush=True)
except Exception as e:
    print(f"refused: {e!r}", flush=True)
os._exit(0)
