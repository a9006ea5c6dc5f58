"""Stands for `diptych` in a session of the documentation's commands (page_session.py).

`serve` and `endpoint-picker` return once they are ready, as if the reader went on in another terminal: a process in the
background keeps its output in the folder DIPTYCH_SERVED, in a file PID.log, and at its end the exit code in PID.exit,
where PID is its own. `end-all` is no command of Diptych's: it stops what still runs and tells what went wrong. All else
is handed on.
"""

import os
import subprocess
import sys
from pathlib import Path

import psutil

CLI = [sys.executable, "-m", "diptych.cluster.cli.main"]
READY = ("Watch it", "Ready: gateway")  # of a cluster, and of an endpoint picker
END_S = 60.0


def main(argv: list[str]) -> int:
    match argv:
        case ["serve" | "endpoint-picker", *_]:
            return serve(argv)
        case ["end-all"]:
            return end_all(Path(os.environ["DIPTYCH_SERVED"]))
        case _:
            return os.execv(CLI[0], [*CLI, *argv])


def serve(argv: list[str]) -> int:
    """Start a server in a process of its own; return 0 when it is ready, 1 when it has ended before."""
    told, tell = os.pipe()
    keeper = os.fork()
    if not keeper:
        os.close(told)
        keep(argv, tell)
    os.close(tell)
    is_ready = os.read(told, 1) == b"r"
    print((Path(os.environ["DIPTYCH_SERVED"]) / f"{keeper}.log").read_text(), end="")
    return 0 if is_ready else 1


def keep(argv: list[str], tell: int) -> None:
    """Run a server to its end; write an "r" to the pipe `tell` when it is ready. Never returns."""
    os.setsid()
    with open(os.devnull, "r+b") as nothing:  # noqa: PTH123
        for number in range(3):
            os.dup2(nothing.fileno(), number)
    own = Path(os.environ["DIPTYCH_SERVED"]) / str(os.getpid())
    with (
        own.with_suffix(".log").open("w", buffering=1) as log,
        subprocess.Popen([*CLI, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server,
    ):
        assert server.stdout is not None
        for line in server.stdout:
            log.write(line)
            if line.startswith(READY):
                os.write(tell, b"r")
    own.with_suffix(".exit").write_text(str(server.returncode))
    os._exit(0)


def end_all(folder: Path) -> int:
    """End every server with SIGTERM; return 1 where one has failed or a process of one is left."""
    faults: list[str] = []
    for log in sorted(folder.glob("*.log")):
        if psutil.pid_exists(keeper := int(log.stem)):
            for server in psutil.Process(keeper).children():
                server.terminate()
            psutil.Process(keeper).wait(END_S)
        if (code := log.with_suffix(".exit").read_text()) != "0":
            faults.append(f"exit code {code}:\n{log.read_text()}")
    others = [p for p in psutil.process_iter() if p.pid not in (1, os.getpid(), os.getppid())]
    _, left = psutil.wait_procs(others, END_S)
    faults += [f"is left: {p.pid} {p.name()}" for p in left]
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
