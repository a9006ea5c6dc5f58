"""Sends requests of a batch over HTTP, again where that may help."""

import asyncio
import random
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from ...workers.common.errors import Unauthenticated, Unavailable
from .lines import BatchLine
from .results import Outcome

MIN_DELAY_S = 0.5
MAX_DELAY_S = 30.0
RETRIED = frozenset(
    (
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    )
)


@dataclass(frozen=True, slots=True)
class SendConfig:
    """`timeout_s`: of each attempt."""

    url: str
    api_key: str | None
    concurrency: int
    attempts: int
    timeout_s: float


class Sender:
    def __init__(self, config: SendConfig) -> None:
        headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        limits = httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency)
        timeout = httpx.Timeout(config.timeout_s)
        base = config.url.rstrip("/").removesuffix("/v1")
        self._client = httpx.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=timeout)
        self._config = config
        self._random = random.Random()

    async def check(self) -> None:
        """Raises Unavailable and Unauthenticated where no request could succeed."""
        try:
            response = await self._client.get("/v1/models")
        except httpx.HTTPError as e:
            raise Unavailable(f"cannot reach {self._config.url}: {_text(e)}. Does the server run there?") from e
        self._check_key(response)

    async def send(self, line: BatchLine) -> Outcome:
        """Raises Unauthenticated: no other request would succeed either."""
        outcome = None
        for attempt in range(self._config.attempts):
            try:
                response = await self._client.post(
                    line.path, content=line.body, headers={"Content-Type": "application/json"}
                )
            except httpx.HTTPError as e:
                outcome = Outcome(line.custom_id, 0, "", None, type(e).__name__, _text(e))
                delay_s = None
            else:
                self._check_key(response)
                outcome = _outcome(line, response)
                if response.status_code not in RETRIED or response.headers.get("x-should-retry") == "false":
                    break
                delay_s = _wanted_delay_s(response)
            if attempt + 1 < self._config.attempts:
                await asyncio.sleep(self._delay_s(attempt) if delay_s is None else delay_s)
        assert outcome is not None
        return outcome

    async def close(self) -> None:
        await self._client.aclose()

    def _check_key(self, response: httpx.Response) -> None:
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            raise Unauthenticated(
                f"{self._config.url} refuses the API key: set DIPTYCH_API_KEY to a valid one, and use --resume"
            )

    def _delay_s(self, attempt: int) -> float:
        """Doubles with each attempt, spread over its half."""
        return min(MAX_DELAY_S, MIN_DELAY_S * 2**attempt) * self._random.uniform(0.5, 1)


def _outcome(line: BatchLine, response: httpx.Response) -> Outcome:
    try:
        body: Any = response.json()
    except ValueError:
        body = {"error": {"code": "invalid_answer", "message": f"the answer is not JSON: {response.text[:300]!r}"}}
    request_id = response.headers.get("x-request-id", "")
    if response.status_code == HTTPStatus.OK:
        return Outcome(line.custom_id, response.status_code, request_id, body)
    error = body.get("error") if isinstance(body, dict) else None
    found = error if isinstance(error, dict) else {}
    code = str(found.get("code") or f"http_{response.status_code}")
    return Outcome(line.custom_id, response.status_code, request_id, body, code, str(found.get("message") or ""))


def _wanted_delay_s(response: httpx.Response) -> float | None:
    """Seconds of Retry-After; None without it, or where it is a date."""
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
