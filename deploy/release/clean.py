"""A virtual environment of nothing but Python, in which no compiler can be found, and what is checked in it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

from .source import CannotRelease

# Of the caller's environment: how pip finds packages, and where temporary files go. No PATH, no CC, no PYTHONPATH.
KEPT = ("HOME", "TMPDIR", "LANG", "SSL_CERT_FILE")
KEPT_ENDINGS = ("_PROXY", "_proxy")
QUESTION, ANSWER = "What is Diptych?", "Diptych is a system that serves large language models"  # of examples/tiny
ANSWER_S = 120.0
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "clang++")


class CleanEnvironment:
    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        self.folder, self.bin = folder, folder / "bin"
        kept = {k: v for k, v in os.environ.items() if k in KEPT or k.startswith("PIP_") or k.endswith(KEPT_ENDINGS)}
        # What names a compiler names none.
        self.variables = kept | {"PATH": str(self.bin), "CC": "false", "CXX": "false"}
        if found := [name for name in COMPILERS if shutil.which(name, path=str(self.bin))]:
            raise CannotRelease(f"{self.bin} holds a compiler: {', '.join(found)}")

    def install(self, *what: str) -> None:
        self.run("pip", "install", "--quiet", "--no-compile", *what)

    def run(self, command: str, *arguments: str, code: int = 0) -> str:
        """Run a command of the environment, outside the sources. Returns what it printed, errors after the rest. Raises
        CannotRelease where it ends with another exit code."""
        done = subprocess.run(
            [str(self.bin / command), *arguments],
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != code:
            raise CannotRelease(
                f"`{command} {' '.join(arguments)}` ended with {done.returncode}, not {code}:\n"
                f"{done.stdout}{done.stderr}"
            )
        return done.stdout + done.stderr

    def python(self, code: str) -> str:
        return self.run("python", "-c", code)

    def size_bytes(self) -> int:
        return sum(path.lstat().st_size for path in self.folder.rglob("*") if not path.is_dir())

    @contextmanager
    def serving(self, *flags: str) -> Generator[tuple[str, str]]:
        """`diptych serve tiny` until the end of the block: yields the HTTP server's base URL and the gRPC address.
        Raises CannotRelease where it does not start, or does not end well after Ctrl-C."""
        name = f"release-{os.getpid()}"  # beside a cluster that may run here
        ports = ("--http-port", "0", "--grpc-port", "0")
        command = [str(self.bin / "diptych"), "serve", "tiny", "--name", name, *ports, *flags]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        try:
            seen: list[str] = []
            for line in process.stdout:
                seen.append(line)
                if match := re.search(r"HTTP (\S+)/v1 +gRPC (\S+)", line):
                    yield match[1], match[2]
                    break
            else:
                raise CannotRelease(f"`diptych serve tiny` does not start:\n{''.join(seen)}")
        finally:
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate()
        if process.returncode:
            raise CannotRelease(f"`diptych serve tiny` ended with {process.returncode} after Ctrl-C:\n{rest}")


def ask(url: str) -> str:
    """Return what the model answers to QUESTION. Raises CannotRelease where that is not what it was taught."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=ANSWER_S) as response:
        text = json.load(response)["choices"][0]["message"]["content"]
    if not text.startswith(ANSWER):
        raise CannotRelease(f"the installed server answers {text!r} to {QUESTION!r}")
    return text


def version_at(url: str) -> str:
    """Return the version that a server states."""
    with urlopen(f"{url}/version", timeout=ANSWER_S) as response:
        return json.load(response)["version"]
