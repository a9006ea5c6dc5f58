"""HTTP handlers of the dashboard: the page, its assets and its data.

The page holds no secret and loads without a key; its script asks for the key and sends it for the data. Nothing of it
comes from elsewhere, and nothing in it is code but the files in assets/: CONTENT_POLICY says so to the browser.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from ....workers.common.errors import Unavailable, UnknownFile
from .snapshots import Snapshots

ASSETS = Path(__file__).with_name("assets")
PAGE = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    kind: str
    tag: str


@cache
def assets() -> Mapping[str, Asset]:
    """All files of the page, by name."""
    found = {path.name: (path.read_bytes(), KINDS[path.suffix]) for path in ASSETS.iterdir()}
    return {
        name: Asset(body, kind, hashlib.blake2b(body, digest_size=12).hexdigest())
        for name, (body, kind) in found.items()
    }


class DashboardApi:
    """Handlers of the dashboard's routes. `snapshots`: None where the server has no router of its own."""

    def __init__(self, snapshots: Snapshots | None) -> None:
        self._snapshots = snapshots

    async def page(self, request: Request) -> Response:
        return _answer(request, assets()[PAGE])

    async def asset(self, request: Request) -> Response:
        """Raises UnknownFile."""
        found = assets().get(request.path_params["name"])
        if found is None:
            raise UnknownFile("the dashboard has no such file: its page is /dashboard")
        return _answer(request, found)

    async def data(self, request: Request) -> Response:
        """Newest snapshot; 304 without a body where it is the one that `If-None-Match` names. Raises Unavailable."""
        if self._snapshots is None:
            raise Unavailable("this server has no router of which a dashboard could show anything")
        snapshot = await self._snapshots.newest()
        headers = {"etag": f'"{snapshot.tag}"', "cache-control": "no-store", "vary": "accept-encoding"}
        if _has(request, snapshot.tag):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            return Response(snapshot.zipped, headers=headers, media_type="application/json")
        return Response(snapshot.body, headers=headers, media_type="application/json")


def _answer(request: Request, asset: Asset) -> Response:
    headers = HEADERS | {"etag": f'"{asset.tag}"', "cache-control": "no-cache"}
    if _has(request, asset.tag):
        return Response(status_code=304, headers=headers)
    return Response(asset.body, headers=headers | {"content-type": asset.kind})


def _has(request: Request, tag: str) -> bool:
    """Return whether the client names what it would get."""
    return f'"{tag}"' in request.headers.get("if-none-match", "")
