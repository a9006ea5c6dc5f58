"""The link to another machine's KV: what fails is told by name, and what comes next is answered."""

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest

from diptych.proto import kv_pb2
from diptych.workers.common.errors import OutOfBlocks, TransportError
from diptych.workers.handoff import machine_link
from diptych.workers.handoff.machine_link import MachineLink
from diptych.workers.handoff.machine_server import serve_machine_kv
from diptych.workers.handoff.machine_stream import MachineStream, StreamEnded
from diptych.workers.kv.layout import Runs
from diptych.workers.kv.memory import KVMemory

from ...support.gpu.fake_cuda import make_device_memory
from ...support.handoff_pair import SMALL, make_memory
from ...support.random_messages import random_message

TWO = replace(SMALL, tensor_parallel=2)
NUM_BLOCKS = 4
PART_BYTES = NUM_BLOCKS * TWO.rank_block_bytes
LAYOUT = TWO.to_proto()
Copy = Callable[[Sequence[tuple[int, int]]], object]


@contextmanager
def served(memory: KVMemory, copy_blocks: Copy = lambda _: None) -> Iterator[socket.socket]:
    here, there = socket.socketpair()
    thread = threading.Thread(target=serve_machine_kv, args=(there, memory, copy_blocks))
    thread.start()
    try:
        yield here
    finally:
        here.close()
        thread.join()


@dataclass
class Asker:
    """Rank 0, saying whatever it likes."""

    stream: MachineStream

    def __call__(
        self, command: kv_pb2.MachineCommand | bytes, payload: bytes = b""
    ) -> tuple[kv_pb2.MachineAnswer, bytes]:
        if isinstance(command, kv_pb2.MachineCommand):
            command.payload_bytes = len(payload)
            command = command.SerializeToString()
        self.stream.send(command, [payload])
        answer = kv_pb2.MachineAnswer.FromString(self.stream.receive())
        return answer, self.stream.receive_bytes(answer.payload_bytes)


def reading(offsets: Sequence[int], lengths: Sequence[int]) -> kv_pb2.MachineCommand:
    runs = kv_pb2.PartRuns(offsets=np.array(offsets, "<i8").tobytes(), lengths=np.array(lengths, "<i8").tobytes())
    return kv_pb2.MachineCommand(number=7, read=runs)


def converting(change: Callable[[kv_pb2.StagedPart], object] = lambda _: None) -> kv_pb2.MachineCommand:
    """One block of TWO, layer 1, into block 3."""
    segment = kv_pb2.Segment(block_ids=[5], generations=[1], first_layer=1, num_layers=1)
    part = kv_pb2.StagedPart(layout=LAYOUT, num_pool_blocks=8, part=segment, table=[3], first_token=0)
    change(part)
    return kv_pb2.MachineCommand(number=7, convert=part)


def copying(sources: Sequence[int], targets: Sequence[int]) -> kv_pb2.MachineCommand:
    return kv_pb2.MachineCommand(number=7, copy=kv_pb2.BlockCopies(sources=sources, targets=targets))


def runs_of(*runs: tuple[int, int]) -> Runs:
    return Runs(*np.array(runs).T)


FITTING = TWO.layer_bytes
BAD: dict[str, tuple[kv_pb2.MachineCommand | bytes, int, str]] = {  # command, bytes of its payload, error
    "no message": (b"\xff\xff\xff", 0, "Error parsing message"),
    "no command": (kv_pb2.MachineCommand(number=7), 100_000, "the command is unknown"),
    "half a number": (kv_pb2.MachineCommand(read=kv_pb2.PartRuns(offsets=b"123", lengths=b"123")), 0, "are no runs"),
    "unlike numbers": (reading([0, 8], [8]), 0, "16 bytes of offsets and 8 of lengths are no runs"),
    "before the part": (reading([-8], [8]), 0, "not within"),
    "beyond the part": (reading([PART_BYTES - 8], [9]), 0, "not within"),
    "beyond all numbers": (reading([1 << 62], [1 << 62]), 0, "not within"),
    "no bytes": (reading([8], [0]), 0, "not within"),
    "less than none": (reading([8], [-1]), 0, "not within"),
    "much at once": (reading([0] * 4000, [PART_BYTES] * 4000), 0, "or have more than"),
    "too many blocks": (converting(lambda of: of.part.block_ids.extend(range(8))), FITTING, "at most 8 are possible"),
    "no blocks": (converting(lambda of: of.part.ClearField("block_ids")), 0, "malformed"),
    "too many layers": (converting(lambda of: setattr(of.part, "num_layers", 3)), 3 * FITTING, "malformed"),
    "a block beyond the pool": (converting(lambda of: of.table.append(NUM_BLOCKS)), FITTING, "blocks beyond the 4"),
    "a long table": (converting(lambda of: of.table.extend([1] * 4)), FITTING, "or some twice"),
    "another model": (converting(lambda of: setattr(of.layout, "model_id", "n")), FITTING, "model_id: m here, n there"),
    "no pool": (converting(lambda of: setattr(of, "num_pool_blocks", 0)), FITTING, "a pool of 0 blocks"),
    "a strange wire": (converting(lambda of: setattr(of, "wire_dtype", "int3")), FITTING, "'int3' is unknown"),
    "too little": (converting(), FITTING - 1, "255 bytes came of a part of 512, of which 256 were due"),
    "too much": (converting(), 2 * FITTING, "512 bytes came of a part of 512, of which 256 were due"),
    "unlike pairs": (copying([1, 2], [3]), 0, "not in pairs"),
    "a block written twice": (copying([1, 2], [3, 3]), 0, "written twice"),
    "a block read and written": (copying([1, 2], [2, 3]), 0, "read and written"),
    "a copy beyond the pool": (copying([1], [NUM_BLOCKS]), 0, "beyond the 4"),
}


@pytest.mark.parametrize("on_device", [False, True])
def test_what_a_command_says_is_checked_and_the_next_one_is_answered(on_device: bool) -> None:
    content = Random(1).randbytes(PART_BYTES)
    ranks = range(1, 2)
    memory = (
        make_device_memory(TWO, NUM_BLOCKS, content, ranks=ranks)
        if on_device
        else make_memory(TWO, NUM_BLOCKS, content=content, ranks=ranks)
    )
    copied: list[tuple[int, int]] = []
    with served(memory, copied.extend) as link, closing(MachineStream(link.dup())) as stream:
        ask = Asker(stream)
        for name, (command, payload_bytes, error) in BAD.items():
            answer, found = ask(command, bytes(payload_bytes))
            assert error in answer.error and not found, name
            answer, found = ask(reading([8, 0], [PART_BYTES - 8, 8]))
            assert (answer.number, answer.error, found) == (7, "", content[8:] + content[:8]), name
        answer, _ = ask(converting(), content[:FITTING])
        assert not answer.error
        _, found = ask(reading([3 * TWO.rank_block_bytes + FITTING], [FITTING]))
        assert found == content[:FITTING]
        answer, _ = ask(copying([1, 1], [2, 3]))
        assert not answer.error and copied == [(1, 2), (1, 3)]


def test_a_part_fits_the_staging_buffer_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.workers.handoff.machine_server.STAGING_BYTES", 2 * FITTING)
    with served(make_memory(TWO, NUM_BLOCKS, ranks=range(1))) as link, closing(MachineStream(link.dup())) as stream:
        ask = Asker(stream)
        answer, _ = ask(converting(lambda of: setattr(of.part, "num_layers", 2)), bytes(2 * FITTING))
        assert "512 bytes came of a part of 1,024, of which 512 were due and at most 512 fit" in answer.error
        assert not ask(converting(), bytes(FITTING))[0].error


@pytest.mark.parametrize("seed", range(2))
def test_random_commands_end_nothing(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    memory, random = make_memory(TWO, NUM_BLOCKS, ranks=range(1)), Random(seed)
    usual = {"number": (1, 2), "num_pool_blocks": (8,), "table": (0, 3), "num_layers": (1, 2), "block_ids": (1, 5)}
    with served(memory) as link, closing(MachineStream(link.dup())) as stream:
        ask, kinds = Asker(stream), set[str]()
        for _ in range(300):
            command = random_message(random, kv_pb2.MachineCommand, usual)
            if random.random() < 0.5:
                command.convert.layout.CopyFrom(LAYOUT)
            answer, _ = ask(command, bytes(random.choice((0, 0, FITTING, 100))))
            kinds.add(answer.kind)
        answer, found = ask(reading([0], [8]))
    assert (answer.error, len(found)) == ("", 8)
    assert kinds <= {"", "TransportError", "LayoutMismatch", "HandoffError"} and len(kinds) > 2
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_errors_there_are_raised_here_by_name(caplog: pytest.LogCaptureFixture) -> None:
    memory, errors = make_memory(TWO, NUM_BLOCKS, 1, ranks=range(1, 2)), iter([OutOfBlocks("no block"), ValueError()])

    def failing(pairs: Sequence[tuple[int, int]]) -> None:
        raise next(errors)

    with served(memory, failing) as end, closing(MachineLink(end.dup(), range(1, 2))) as link:
        with pytest.raises(TransportError, match="rank 1, on another machine: no block"):
            link.copy_blocks([(1, 2)])
        assert not caplog.records
        with pytest.raises(TransportError, match=r"rank 1, on another machine: ValueError\(\)"):
            link.copy_blocks([(1, 2)])
        assert "by our own fault" in caplog.text
        with pytest.raises(TransportError, match="rank 1, on another machine: KV cannot move"):
            link.convert(kv_pb2.StagedPart(), [memoryview(b"123")])
        assert (
            link.read(runs_of((0, 8), (16, 4)))
            == bytes(memory.region.view or b"")[:8] + bytes(memory.region.view or b"")[16:20]
        )
        assert not link.lost.done()
    assert link.lost.cancelled()


def test_a_device_that_fails_is_told_and_the_next_command_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make_device_memory(TWO, NUM_BLOCKS, ranks=range(1, 2))
    read, errors = type(memory.device).read, iter([TransportError("the GPU could not copy KV")])

    def failing(device: object, runs: Runs) -> bytes:
        for error in errors:
            raise error
        return read(device, runs)  # type: ignore[arg-type]

    monkeypatch.setattr(type(memory.device), "read", failing)
    with served(memory) as end, closing(MachineLink(end.dup(), range(1, 2))) as link:
        with pytest.raises(TransportError, match="rank 1, on another machine: the GPU could not copy KV"):
            link.read(runs_of((0, 8)))
        assert link.read(runs_of((0, 8))) == bytes(8)


def test_threads_share_a_link() -> None:
    content = Random(2).randbytes(PART_BYTES)
    memory = make_memory(TWO, NUM_BLOCKS, content=content, ranks=range(1, 2))
    with served(memory) as end, closing(MachineLink(end.dup(), range(1, 2))) as link, ThreadPoolExecutor(4) as threads:
        starts = list(range(0, 1000, 10))
        found = threads.map(lambda start: link.read(runs_of((start, 100))), starts)
        assert [*found] == [content[start : start + 100] for start in starts]


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (None, "the other end has closed it"),
        (b"\xff\xff", "Error parsing message"),
        (kv_pb2.MachineAnswer(number=2, payload_bytes=8), "nobody asked for"),
        (kv_pb2.MachineAnswer(number=1, payload_bytes=9), "nobody asked for"),
        (kv_pb2.MachineAnswer(number=1, error="e", payload_bytes=8), "nobody asked for"),
        (kv_pb2.MachineAnswer(number=1, payload_bytes=8), "the other end has closed it"),  # which it sends half of
    ],
)
def test_a_peer_that_ends_or_lies_loses_the_link(answer: kv_pb2.MachineAnswer | bytes | None, cause: str) -> None:
    here, there = socket.socketpair()

    def answering() -> None:
        with closing(MachineStream(there)) as stream:
            stream.receive()
            if answer is None:
                return
            with suppress(StreamEnded):  # the link may close at the answer
                stream.send(answer if isinstance(answer, bytes) else answer.SerializeToString(), [bytes(4)])

    peer = threading.Thread(target=answering)
    peer.start()
    with closing(MachineLink(here, range(2, 4))) as link:
        with pytest.raises(TransportError, match=f"rank 2, on another machine, is lost: .*{cause}"):
            link.read(runs_of((0, 8)))
        peer.join()
        assert cause in str(link.lost.result(0))
        with pytest.raises(TransportError, match=cause):
            link.copy_blocks([(0, 1)])


def test_a_peer_that_says_nothing_and_one_that_takes_nothing_lose_the_link() -> None:
    for ask in (
        lambda of: of.copy_blocks([]),
        lambda of: of.convert(kv_pb2.StagedPart(), [memoryview(bytes(1 << 24))]),
    ):
        here, there = socket.socketpair()
        with there, closing(MachineLink(here, range(2, 4), timeout_s=0.01)) as link:
            with pytest.raises(TransportError, match=r"rank 2, .* nothing came, or was taken, for 0\.01 s"):
                ask(link)
            assert link.lost.done()


def test_closing_ends_what_is_under_way() -> None:
    here, there = socket.socketpair()
    link = MachineLink(here, range(2, 4))
    with closing(MachineStream(there)) as stream, ThreadPoolExecutor(1) as threads:
        reading = threads.submit(link.read, runs_of((0, 8)))
        stream.receive()
        link.close()
        link.close()
        with pytest.raises(TransportError, match="rank 2"):
            reading.result()
        with pytest.raises(CancelledError):
            link.lost.result()


def test_what_is_no_stream_of_ours_ends_the_server() -> None:
    """A message so large would need the memory."""
    with served(make_memory(TWO, NUM_BLOCKS, ranks=range(1))) as link:
        link.sendall((1 << 30).to_bytes(4, "big"))
        assert link.recv(1) == b""


def test_the_bound_on_an_answer_is_that_of_steps() -> None:
    here, there = socket.socketpair()
    with there, closing(MachineLink(here, range(1, 2))):
        bound = here.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
    assert int.from_bytes(bound[:8], "little") == machine_link.STALL.total_seconds()
