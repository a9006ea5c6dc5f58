"""KV over gRPC: the source's KVHandoff.Pull streams the bytes. Works wherever the worker itself can be reached.

Every write into our memory happens here, on the event loop: when `read` has ended, however it ended, nothing lands.
"""

import grpc
import grpc.aio

from ...proto import kv_pb2
from ..common.errors import TransportError
from ..common.tls import lost_peer
from ..kv.layout import Copies, Region
from .base import KVReader, Source, Transport
from .runs import Scatter
from .tracked_reader import READ_TIMEOUT_S, SLOWEST_BYTES_S


class GrpcReader(KVReader):
    def __init__(self, source: Source) -> None:
        self._source = source

    async def read(self, segment: kv_pb2.Segment, copies: Copies, into: Region) -> None:
        assert into.view is not None
        target = Scatter(into.view, copies.into)
        num_bytes = target.num_missing
        request = kv_pb2.PullRequest(
            handoff_id=self._source.handoff_id, sink_incarnation=self._source.sink_incarnation, segment=segment
        )
        timeout_s = READ_TIMEOUT_S + num_bytes / SLOWEST_BYTES_S
        call = self._source.stub.Pull(request, timeout=timeout_s, metadata=self._source.metadata)
        try:
            async for chunk in call:
                target.write(chunk.data)
        except grpc.aio.AioRpcError as e:
            cause = f"{e.code().name} {e.details()}"
            if e.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise lost_peer("the source worker can no longer be reached", cause) from e
            raise TransportError(f"the source ended a pull of {num_bytes:,} bytes: {cause}") from e
        except ValueError as e:
            raise TransportError(f"the source sent more than the {num_bytes:,} bytes asked for") from e
        finally:
            call.cancel()
        if target.num_missing:
            raise TransportError(f"the source sent {target.num_missing:,} bytes too few of {num_bytes:,}")


class GrpcTransport(Transport):
    name = "grpc"

    async def connect(self, source: Source) -> KVReader:
        return GrpcReader(source)
