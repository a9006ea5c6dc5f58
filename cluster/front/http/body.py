"""Reads the body of an HTTP call: bounded in bytes, as sent and as inflated, and in time."""

import asyncio
import zlib
from collections.abc import Iterable

from starlette.requests import ClientDisconnect, Request

from ....workers.common.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, RequestAborted, UnsupportedEncoding
from ...common.quota import QuotaShare
from .connection import HAS_BODY

STEP_BYTES = 256 << 10  # inflated between two turns of the event loop: under a millisecond
SMALL_BODY_BYTES = 65_536  # of each body: not counted, because the number of connections is bounded
_GZIP_BITS = 16 + zlib.MAX_WBITS


async def read_json(request: Request, max_bytes: int, timeout_s: float, held: QuotaShare) -> bytes:
    """Body of a POST with JSON, inflated where it is gzip. `held` counts its bytes beyond
    SMALL_BODY_BYTES. Raises InvalidRequest, BodyTooLarge, BodyTooSlow, UnsupportedEncoding, Overloaded."""
    headers = dict(reversed(request.scope["headers"]))  # of those that were sent twice, the first
    media_type = headers.get(b"content-type", b"").decode("latin-1").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest(f"send the body as content-type: application/json, got {media_type[:100] or 'none'!r}")
    body = _body(headers.get(b"content-encoding", b"").decode("latin-1"), max_bytes)
    if int(headers.get(b"content-length", b"0")) > max_bytes:
        raise _too_large(max_bytes)
    try:
        if HAS_BODY in request.scope["state"]:
            await _receive(request, body, held)
        else:
            async with asyncio.timeout(timeout_s):
                await _receive(request, body, held)
    except TimeoutError as e:
        raise BodyTooSlow(f"the body did not arrive within {timeout_s:g} s: send it faster") from e
    except ClientDisconnect as e:
        raise RequestAborted("the client disconnected before it sent the whole body") from e
    return body.whole()


async def _receive(request: Request, body: "_BodyReader", held: QuotaShare) -> None:
    async for piece in request.stream():
        for _ in body.steps(piece):
            await asyncio.sleep(0)
        if len(body) > SMALL_BODY_BYTES:
            held.take(len(body) - SMALL_BODY_BYTES - held.num_taken)


def _body(encoding: str, max_bytes: int) -> "_BodyReader":
    match encoding.strip().lower():
        case "" | "identity":
            return _BodyReader(max_bytes)
        case "gzip" | "x-gzip":
            return _GzipBodyReader(max_bytes)
        case other:
            raise UnsupportedEncoding(
                f"send the body without encoding or with content-encoding: gzip, not {other[:100]!r}"
            )


class _BodyReader:
    """Bytes of a body that have come so far."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._body = bytearray()

    def __len__(self) -> int:
        return len(self._body)

    def steps(self, piece: bytes) -> Iterable[None]:
        """Add a piece, in steps between which the event loop may run. Raises BodyTooLarge, InvalidRequest."""
        self._add(piece)
        return ()

    def whole(self) -> bytes:
        return bytes(self._body)

    def _add(self, piece: bytes) -> None:
        self._body += piece
        if len(self._body) > self._max_bytes:
            raise _too_large(self._max_bytes)


class _GzipBodyReader(_BodyReader):
    """Inflated bytes of a gzip body so far. A body that inflates to more than the bound is refused."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._inflater = zlib.decompressobj(_GZIP_BITS)

    def steps(self, piece: bytes) -> Iterable[None]:
        try:
            while piece:
                inflated = self._inflater.decompress(piece, STEP_BYTES)
                self._add(inflated)
                piece = self._inflater.unconsumed_tail
                yield
        except zlib.error as e:
            raise InvalidRequest(f"the body is not gzip: {e}") from e
        if self._inflater.unused_data:
            raise InvalidRequest("the body continues after its gzip data: send one gzip member")

    def whole(self) -> bytes:
        """The inflated body. Raises InvalidRequest where its end is missing."""
        self._add(self._inflater.flush())
        if not self._inflater.eof:
            raise InvalidRequest("the gzip body is incomplete: send all of it")
        return super().whole()


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {max_bytes} bytes: send several calls")
