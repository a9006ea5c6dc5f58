"""A rank other than 0, as far as its NIXL agent goes, that answers by a script."""

import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from diptych.proto import kv_pb2

Answer = Callable[[kv_pb2.RankCommand], kv_pb2.RankAnswer]


class ScriptedRank:
    """A rank that answers its first commands, and nothing more."""

    def __init__(self, *answers: Answer) -> None:
        self.ours, self._theirs = socket.socketpair()
        self._answers = answers
        self._thread = threading.Thread(target=self._run, name="scripted-rank")
        self._thread.start()

    def _run(self) -> None:
        with Connection(self._theirs.dup().detach()) as connection:
            for answer in self._answers:
                command = kv_pb2.RankCommand.FromString(connection.recv_bytes())
                connection.send_bytes(answer(command).SerializeToString())

    def end(self) -> None:
        self._thread.join()
        self._theirs.close()


def opened(command: kv_pb2.RankCommand) -> kv_pb2.RankAnswer:
    assert command.WhichOneof("command") == "open"
    endpoint = kv_pb2.NixlEndpoint(agent_name="a", metadata=b"m", base_address=4096, num_bytes=4096, memory="DRAM")
    return kv_pb2.RankAnswer(number=command.number, endpoint=endpoint, can_receive=True)


def done(command: kv_pb2.RankCommand) -> kv_pb2.RankAnswer:
    return kv_pb2.RankAnswer(number=command.number)


def stopped(command: kv_pb2.RankCommand) -> kv_pb2.RankAnswer:
    assert command.WhichOneof("command") == "stop"
    return kv_pb2.RankAnswer(number=command.number, has_stopped=True)


def without_nixl(command: kv_pb2.RankCommand) -> kv_pb2.RankAnswer:
    return kv_pb2.RankAnswer(number=command.number, error="No module named 'nixl'")


def measured(bytes_s: float) -> Answer:
    """An answer to `measure`."""

    def answer(command: kv_pb2.RankCommand) -> kv_pb2.RankAnswer:
        assert command.WhichOneof("command") == "measure"
        return kv_pb2.RankAnswer(number=command.number, bytes_s=bytes_s)

    return answer
