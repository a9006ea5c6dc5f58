"""Process of a rank with a device of its own, as far as hand-offs read into it: its piece is a memory file.

python -m tests.support.gpu.rank_process LINK PIECE NUM_BYTES      two descriptors
"""

import ctypes
import mmap
import socket
import subprocess
import sys

from diptych.workers.kv.layout import Region
from diptych.workers.transport.rank_agent import serve_rank


def start_rank(link: socket.socket, piece: int, num_bytes: int) -> "subprocess.Popen[bytes]":
    """Start one. piece: a descriptor of its memory file."""
    flags = [link.fileno(), piece, num_bytes]
    return subprocess.Popen([sys.executable, "-m", __name__, *map(str, flags)], pass_fds=flags[:2])


def main(link: int, piece: int, num_bytes: int) -> None:
    memory = mmap.mmap(piece, num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    serve_rank(socket.socket(fileno=link), Region(address, num_bytes, None, is_fake=True))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
