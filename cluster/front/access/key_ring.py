"""Keys that clients may show as `Authorization: Bearer KEY`, and whose they are.

A key is looked up by a hash with a secret that each process makes: what a look-up takes tells nothing about the keys.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping, Sequence

from ....workers.common.errors import ConfigError
from .accounts import Account
from .key_file import DEFAULT_NAME, KeyFile, NamedKey, digest_of

RELOAD_S = 2.0  # between two looks at the file

log = logging.getLogger("diptych.keys")


class KeyRing:
    """The single key, named `default`, and those of a file. Without either every client may call."""

    def __init__(self, single: str | None = None, file: KeyFile | None = None, num_routers: int = 1) -> None:
        """`num_routers`: that share each key's limits. Raises ConfigError for a file that cannot be read."""
        self._num_routers = num_routers
        self._secret = secrets.token_bytes(32)
        self._single = () if single is None else (NamedKey(DEFAULT_NAME, digest_of(single.encode())),)
        self._file = file
        self.is_open = single is None and file is None  # clients need no key
        self.separates_tenants = file is not None  # each key is a tenant of its own
        self._error = ""  # of the last look at the file
        self.num_failed_loads = 0
        self._accounts: dict[bytes, Account] = {}
        self._take(file.load() or () if file else ())

    @property
    def accounts(self) -> list[Account]:
        return list(self._accounts.values())

    def find(self, header: bytes) -> Account | None:
        """Account of the key that the header's value holds; None: it holds none."""
        scheme, _, given = header.partition(b" ")
        found = self._accounts.get(self._hash(digest_of(given.strip())))
        return found if scheme.lower() == b"bearer" else None

    def accepts(self, header: bytes) -> bool:
        return self.is_open or self.find(header) is not None

    def is_single(self, header: bytes) -> bool:
        """Return whether the header holds the single key, which is the operator's."""
        found = self.find(header)
        return found is not None and found.name == DEFAULT_NAME

    def reload(self) -> None:
        """Take the file's keys where it has changed. One that cannot be read changes nothing, and is reported once."""
        self._apply(self._look())

    async def keep_current(self) -> None:
        """Reload the file now and then, until cancelled."""
        while self._file is not None:
            await asyncio.sleep(RELOAD_S)
            self._apply(await asyncio.to_thread(self._look))

    def _look(self) -> tuple[NamedKey, ...] | ConfigError | None:
        assert self._file is not None
        try:
            return self._file.load()
        except ConfigError as e:
            return e

    def _apply(self, found: tuple[NamedKey, ...] | ConfigError | None) -> None:
        error = found.message if isinstance(found, ConfigError) else ""
        if error:
            self.num_failed_loads += 1
            if error != self._error:
                log.error("the API keys stay as they were: %s", error)
        elif isinstance(found, tuple):
            self._take(found)
            log.info("read %d API keys from their file", len(found))
        self._error = error

    def _take(self, keys: Sequence[NamedKey]) -> None:
        before = {account.name: account for account in self._accounts.values()}
        self._accounts = {self._hash(key.sha256): self._account(key, before) for key in (*keys, *self._single)}

    def _account(self, key: NamedKey, before: Mapping[str, Account]) -> Account:
        if (account := before.get(key.name)) is None:
            return Account(key, is_tenant=self.separates_tenants, num_routers=self._num_routers)
        account.update(key)
        return account

    def _hash(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()


def is_bearer(header: bytes, key: str) -> bool:
    """Return whether the header's value holds the key. Takes the same time for every wrong key."""
    scheme, _, given = header.partition(b" ")
    return hmac.compare_digest(given.strip(), key.encode()) and scheme.lower() == b"bearer"
