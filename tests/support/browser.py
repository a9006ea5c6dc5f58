"""Headless Chromium, as a person with a dashboard; and a proxy that serves a server at a sub-path."""

import base64
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from .devtools import BrowserError, DevTools

WAIT_S = 60.0
LOOK_S = 0.03  # between two looks at a page
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--lang=en-GB",
    "--remote-debugging-pipe",
)
HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}  # headers of one connection
COMPLAINTS = ("error", "warning", "assert")


class Page:
    """A tab of a browser."""

    def __init__(self, tools: DevTools) -> None:
        self.tools = tools

    def open(self, url: str) -> None:
        self.tools.call("Page.navigate", url=url)
        self.until(lambda: self.run("location.href") == url and self.run("document.readyState") == "complete")

    def run(self, expression: str, *args: object) -> Any:
        """Value of an expression, or of a function's body where it says `return`, which sees `args`. Raises
        BrowserError where it throws."""
        body = expression if "return " in expression else f"return {expression}"
        answer = self.tools.call(
            "Runtime.callFunctionOn",
            functionDeclaration=f"function (...args) {{ {body} }}",
            executionContextId=self._context(),
            arguments=[{"value": arg} for arg in args],
            returnByValue=True,
            awaitPromise=True,
        )
        if "exceptionDetails" in answer:
            raise BrowserError(answer["exceptionDetails"]["exception"].get("description", "a script threw"))
        return answer["result"].get("value")

    def _context(self) -> int:
        """Number of the page's present world of scripts."""
        made = [e["params"]["context"] for e in self.tools.events if e["method"] == "Runtime.executionContextCreated"]
        return made[-1]["id"]

    def text(self, selector: str) -> str:
        """Text of all elements that it selects."""
        return self.run("[...document.querySelectorAll(args[0])].map(e => e.textContent).join(' ')", selector)

    def texts(self, selector: str) -> list[str]:
        return self.run("[...document.querySelectorAll(args[0])].map(e => e.textContent)", selector)

    def number_of(self, selector: str) -> int:
        return self.run("document.querySelectorAll(args[0]).length", selector)

    def click(self, selector: str) -> None:
        self.run("document.querySelector(args[0]).click()", selector)

    def write(self, selector: str, text: str) -> None:
        """Write into a field, as its keys would."""
        self.run("const e = document.querySelector(args[0]); e.focus(); e.select(); return 0", selector)
        self.tools.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key with a name, as ArrowDown, where the focus is."""
        for kind in ("rawKeyDown", "keyUp"):
            self.tools.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def until(self, get: Callable[[], Any]) -> Any:
        """First result of `get` that is true."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                if found := get():
                    return found
            except BrowserError as e:
                if "context" not in str(e):  # of a page that has just been left
                    raise
            assert time.monotonic() < deadline, f"it did not come; the console has {self.errors()}"
            time.sleep(LOOK_S)

    def until_text(self, selector: str, words: str) -> None:
        try:
            self.until(lambda: words in self.text(selector))
        except AssertionError as e:
            raise AssertionError(f"{selector} has no {words!r} but {self.text(selector)!r}: {e}") from e

    def errors(self) -> list[str]:
        """Errors and warnings since the last call, of scripts, of the console and of the browser."""
        self.run("0")  # reads what has been reported
        found: list[str] = []
        for event in self.tools.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in COMPLAINTS:
                found.append(str(params["args"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in COMPLAINTS:
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        self.tools.events = [e for e in self.tools.events if e["method"] == "Runtime.executionContextCreated"][-1:]
        return found

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page, also to that of a phone, which a window cannot have."""
        size: dict[str, Any] = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.tools.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """Let the system prefer `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.tools.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.tools.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browsing(width: int = 1280, height: int = 900) -> Generator[Page]:
    """A new browser, with nothing kept from another."""
    program = shutil.which("chromium")
    assert program, "install chromium (Debian's package)"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tools = DevTools([program, *FLAGS, f"--user-data-dir={folder}"])
        try:
            page = Page(tools.attach())
            page.resize(width, height)
            yield page
        finally:
            tools.close()


@contextmanager
def behind(url: str, prefix: str) -> Generator[str]:
    """Reverse proxy of a server. Yields its URL, which ends with `prefix`; it serves nothing outside it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on(b"")

        def do_POST(self) -> None:
            self._pass_on(self.rfile.read(int(self.headers.get("content-length", 0))))

        def _pass_on(self, body: bytes) -> None:
            if not self.path.startswith(f"{prefix}/"):
                self.send_error(404)
                return
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
            target = url + self.path.removeprefix(prefix)
            with httpx.stream(self.command, target, headers=headers, content=body or None, timeout=WAIT_S) as answer:
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name not in HOP:
                        self.send_header(name, value)
                self.send_header("connection", "close")
                self.end_headers()
                for part in answer.iter_raw():
                    self.wfile.write(part)
                    self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{prefix}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
