"""Checks an sdist and a wheel as their users will use them: for clients, for servers, and without a compiler.

client   the wheel without extras: `diptych bench` and diptych.Client, and no torch; `serve` says what is missing
sdist    the same from the sdist, which builds without a compiler: all but the kernels is there
server   the wheel with the extra `serve`: the kernels load and compute, and the client's environment asks for answers
"""

import tempfile
from pathlib import Path

from .clean import QUESTION, CleanEnvironment, ask, version_at
from .source import CannotRelease, version

HEAVY = ("torch", "ray", "transformers")
KERNELS = "diptych.workers.execution.cpu.cpu_kernels"
MIB = 1 << 20
FIND_LIBRARY = (
    "from pathlib import Path; import diptych; print(*Path(diptych.__file__).parent.glob('kernels/cpu/*.so'))"
)


def check(sdist: Path, wheel: Path, torch: str) -> None:
    """`torch`: what pip is asked for, before the wheel. Raises CannotRelease."""
    with tempfile.TemporaryDirectory(prefix="diptych-") as folder:
        client = CleanEnvironment(Path(folder, "client"))
        check_client(client, wheel)
        check_sdist_without_compiler(CleanEnvironment(Path(folder, "sdist")), sdist)
        check_server(CleanEnvironment(Path(folder, "server")), client, wheel, torch)


def check_client(client: CleanEnvironment, wheel: Path) -> None:
    client.install(f"{wheel}[client]")
    _check_version(client)
    found = client.python(f"from importlib.util import find_spec; print(*filter(find_spec, {HEAVY!r}))").strip()
    if found:
        raise CannotRelease(f"the wheel without extras installs {found}")
    client.python("from diptych import AsyncClient, Client")
    for command in ("bench", "batch", "plan", "simulate"):
        client.run("diptych", command, "--help")
    if "pip install 'diptych[serve]'" not in client.run("diptych", "serve", "tiny", code=2):
        raise CannotRelease("`diptych serve` does not say how to install what it needs")
    _say("a client", client)


def check_sdist_without_compiler(environment: CleanEnvironment, sdist: Path) -> None:
    environment.install("--no-deps", str(sdist))
    environment.install(str(sdist))
    _check_version(environment)
    if library := environment.python(FIND_LIBRARY).strip():
        raise CannotRelease(f"there was a compiler after all: {library}")
    _say("the sdist, without a compiler", environment)


def check_server(server: CleanEnvironment, client: CleanEnvironment, wheel: Path, torch: str) -> None:
    server.install(torch)
    server.install(f"{wheel}[serve]")
    _check_version(server)
    why = server.run("python", "-m", KERNELS).strip()
    print(f"  {why}", flush=True)
    if not why.startswith("compiled kernels compute"):
        raise CannotRelease(f"the wheel's kernels do not compute: {why}")
    isa = why.partition(" for ")[2].split()[0]
    with server.serving("--cpu-isa", isa) as (url, target):  # an error where the kernels cannot be used
        if (stated := version_at(url)) != version():
            raise CannotRelease(f"/version says {stated}, pyproject.toml {version()}")
        answer = ask(url)
        print(f"  {QUESTION} {answer}", flush=True)
        client.run("diptych", "bench", "--url", url, "--num-requests", "8", "--output-tokens", "8")
        code = (
            f"from diptych import Client\nwith Client({target!r}) as client:\n"
            f"    print(client.chat([{{'role': 'user', 'content': {QUESTION!r}}}], temperature=0).text)"
        )
        if (text := client.python(code).strip()) != answer.strip():
            raise CannotRelease(f"over gRPC the answer is {text!r}, over HTTP {answer!r}")
    _say("a server", server)


def _check_version(environment: CleanEnvironment) -> None:
    if (said := environment.run("diptych", "--version").strip()) != f"diptych {version()}":
        raise CannotRelease(f"`diptych --version` says {said!r}, pyproject.toml {version()}")


def _say(what: str, environment: CleanEnvironment) -> None:
    print(f"{what}: works, {environment.size_bytes() / MIB:,.0f} MiB installed", flush=True)
