"""The Chrome DevTools Protocol over a pipe: commands of a page and their results, and the events of its console.

Messages are JSON, each ended by a NUL; the browser reads them from its descriptor 3 and writes them to its descriptor 4
(`--remote-debugging-pipe`). Nobody else can reach it, and no port is needed.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any, Self

BROWSER_READS, BROWSER_WRITES = 3, 4  # descriptors
CHUNK_BYTES = 1 << 16
Json = dict[str, Any]


class BrowserError(Exception):
    """The browser refused a command, ended, or a script raised."""


class DevTools:
    """Connection to one tab of a new browser. `events` holds what the tab reported, oldest first."""

    def __init__(self, command: Sequence[str]) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # A shell moves the two pipes to the descriptors that the browser expects.
        shell = f'exec "$@" {BROWSER_READS}<&{to_browser} {BROWSER_WRITES}>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "browser", *command],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._number = 0
        self._session = ""
        self.events: list[Json] = []

    def attach(self) -> Self:
        """Take the first tab, and listen to it."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def call(self, method: str, **params: object) -> Json:
        """Result of a command. Raises BrowserError."""
        self._number += 1
        message: Json = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]
            if "method" in answer:
                self.events.append(answer)

    def close(self) -> None:
        """End the browser."""
        self._session = ""
        try:
            self.call("Browser.close")
        except (BrowserError, OSError):
            self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _next(self) -> Json:
        while b"\0" not in self._rest:
            part = os.read(self._read, CHUNK_BYTES)
            if not part:
                raise BrowserError("the browser has ended")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
