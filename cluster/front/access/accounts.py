"""Accounts, one for each API key, and calls on them.

key shown -> Account.begin: limits of requests -> Call: reserves tokens when they are known -> ends, settles
"""

import hashlib
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from ....workers.common.errors import RateLimited
from ....workers.common.request import check_cache_salt
from ...common.quota import QuotaShare
from .key_file import NamedKey
from .limits import Header, Limits
from .usage import Totals, Usage

SALT_BYTES = 32


class Metered(Protocol):
    @property
    def usage(self) -> Usage: ...


class Account:
    def __init__(
        self, key: NamedKey, *, is_tenant: bool, num_routers: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`is_tenant`: it is served in turn with the others, and shares cached prefixes with none of them."""
        self.key = key
        self.tenant = key.name.encode() if is_tenant else b""
        self.totals = Totals()
        self.clock = clock
        self.limits = Limits(key.name, num_routers)
        self.limits.set(key.limits, clock())

    @property
    def name(self) -> str:
        return self.key.name

    def update(self, key: NamedKey) -> None:
        """Take the key's new settings. What was used before stays used."""
        self.key = key
        self.limits.set(key.limits, self.clock())

    def begin(self) -> "Call":
        """Begin a call, which must be entered or ended. Raises RateLimited."""
        try:
            running = self.limits.begin(self.clock())
        except RateLimited as e:
            self.totals.num_refused[e.reason] += 1
            raise
        self.totals.num_requests += 1
        return Call(self, running)

    def headers(self) -> list[Header]:
        return self.limits.headers(self.clock())

    def owner(self, given: str) -> tuple[bytes, bytes]:
        """Tenant of a request and its salt of the prefix cache. Raises InvalidRequest."""
        return self.tenant, self.cache_salt(given)

    def cache_salt(self, given: str) -> bytes:
        """Salt of the prefix cache for a client's salt: of no other tenant's calls, whatever they give. Raises
        InvalidRequest."""
        salt = given.encode()
        if not self.tenant:
            return salt
        check_cache_salt(salt)
        return hashlib.blake2b(self.tenant + b"\0" + salt, digest_size=SALT_BYTES).digest()  # no name has a NUL


class Call:
    """One call, or its context manager. At its end what was reserved and not used is given back."""

    def __init__(self, account: Account, running: QuotaShare) -> None:
        self.account = account
        self._running = running
        self._began = account.clock()
        self._reserved: list[tuple[Metered, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        self._running.give_back()
        account, now = self.account, self.account.clock()
        account.limits.end(now - self._began)
        for work, num_reserved in self._reserved:
            usage = work.usage
            account.limits.settle(num_reserved, usage.prompt_tokens + usage.completion_tokens, now)
            account.totals.add(usage)

    def admit(self, work: Metered, num_output_tokens: int) -> None:
        """Reserve the tokens of `work`: its prompt's, and those that it asks for. Raises RateLimited."""
        num_tokens = work.usage.prompt_tokens + num_output_tokens
        try:
            self.account.limits.reserve(num_tokens, self.account.clock())
        except RateLimited as e:
            self.account.totals.num_refused[e.reason] += 1
            raise
        self._reserved.append((work, num_tokens))
