"""Messages between a router and a process of its tasks (task_process.py): frames of a JSON head and a body;
and what such a process is made of.

A frame is the sizes of both in bytes (two uint32), the head, the body.
"""

import json
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from ...workers.common.errors import DiptychError
from ...workers.common.parent_process import end_with_parent

Head = dict[str, Any]
Frame = tuple[bytes, bytes]  # sizes and head, and the body, which is not copied

SIZES = struct.Struct("<II")
CHAT, TEXT, BODY = "chat", "text", "body"  # kinds of task
MAX_JOINED_BYTES = 65_536  # of a body that is joined to its head


def to_frame(head: Head, body: bytes = b"") -> Frame:
    text = json.dumps(head).encode()
    return SIZES.pack(len(text), len(body)) + text, body


def of_error(error: DiptychError) -> Frame:
    return to_frame({"error": type(error).__name__, "message": error.message, "param": error.param})


def read_frame(stream: BinaryIO) -> tuple[Head, bytes] | None:
    """Next frame; None: the stream has ended."""
    sizes = stream.read(SIZES.size)
    if len(sizes) < SIZES.size:
        return None
    num_head, num_body = SIZES.unpack(sizes)
    return json.loads(stream.read(num_head)), stream.read(num_body)


def send_frame(sock: socket.socket, frame: Frame) -> None:
    head, body = frame
    if len(body) <= MAX_JOINED_BYTES:  # so that the router is woken once
        sock.sendall(head + body)
    else:
        sock.sendall(head)
        sock.sendall(body)


def bound_memory(more: int) -> None:
    """Limit the data of this process to its present size and so many bytes more."""
    status = Path("/proc/self/status").read_text()
    held = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + more, held + more))


def run_process(serve: Callable[[BinaryIO, socket.socket], None]) -> None:
    """Run a process of tasks: standard input is a socket, whose end ends the process, as does its parent's end."""
    end_with_parent()
    # The router handles signals to the whole process group, and then closes the socket.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=sys.stdin.fileno())
    with sock, sock.makefile("rb") as stream:
        serve(stream, sock)
