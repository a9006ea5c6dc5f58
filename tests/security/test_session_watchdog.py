"""The end of a session ends only its descendants, whatever files they have open."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from diptych.cluster.placement.session_watchdog import ProcessTree

HOLD = "import sys; log = open(sys.argv[1], 'a'); print('open', flush=True); sys.stdin.read()"
# Starts a child that holds a log of the session, and ends its session on command.
COMMAND = f"""
import subprocess, sys
from pathlib import Path
from diptych.cluster.placement.session_watchdog import SessionWatchdog
folder = Path(sys.argv[1])
watchdog = SessionWatchdog(folder)
child = subprocess.Popen([sys.executable, "-c", {HOLD!r}, str(folder / "child.log")], stdin=subprocess.PIPE)
sys.stdin.readline()
watchdog.end(0.0)
child.wait()
print("ended", flush=True)
"""
# Starts a child that holds a log, and ends without it.
PARENT = f"""
import subprocess, sys
code = {HOLD!r}.replace("sys.stdin.read()", "import signal; signal.pause()")
subprocess.Popen([sys.executable, "-c", code, sys.argv[1]])
sys.stdin.readline()
"""
END_S = 60.0


@contextmanager
def started(code: str, *args: str) -> "Iterator[subprocess.Popen[str]]":
    """Return when it has reported that it, or its child, has the file open."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    assert process.stdout.readline() == "open\n"
    try:
        yield process
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(END_S)


def test_a_stranger_who_reads_a_log_of_the_session_lives(tmp_path: Path) -> None:
    folder = tmp_path / "session"
    folder.mkdir()
    with started(HOLD, str(folder / "child.log")) as stranger, started(COMMAND, str(folder)) as command:
        (child,) = (p for p in psutil.Process(command.pid).children() if str(folder / "child.log") in p.cmdline())
        assert command.stdin and command.stdout
        print(file=command.stdin, flush=True)
        assert command.stdout.readline() == "ended\n"
        assert not child.is_running()
        assert stranger.poll() is None


def test_a_child_of_a_dead_parent_is_a_member_while_it_lives(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    with started(HOLD, str(log)) as stranger, started(PARENT, str(log)) as parent:
        tree = ProcessTree(psutil.Process(parent.pid))
        (child,) = tree.members(tmp_path)
        parent.kill()
        parent.wait(END_S)
        assert tree.members(tmp_path) == [child]
        assert stranger.poll() is None
        child.kill()
        psutil.wait_procs([child], END_S)
        assert tree.members(tmp_path) == []
