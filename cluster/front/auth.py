"""API key that clients send as `Authorization: Bearer KEY`."""

import hmac


class ApiKey:
    """Key of the front door. None: no key is asked for."""

    def __init__(self, key: str | None) -> None:
        self._expected = None if key is None else key.encode()

    def accepts(self, header: bytes) -> bool:
        """Return whether the header's value holds the key. Takes the same time for every wrong key."""
        if self._expected is None:
            return True
        scheme, _, given = header.partition(b" ")
        return hmac.compare_digest(given.strip(), self._expected) and scheme.lower() == b"bearer"
