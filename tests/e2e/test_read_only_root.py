"""A cluster with the rights that the pods of deploy/kubernetes have: another user than root, no capability, none to be
had, and nothing to write to but /tmp, the home and /dev/shm."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ..deploy.manifests import objects, pods
from ..support.cluster_harness import CLI, END_S, MODEL, output_until_ready

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.long]

# In a mount namespace: every file system but the kernel's becomes read-only, and the places that pods may write to are
# empty and in memory. An interpreter below root's home is shown to other users ($1: its folder). $2 must be read-only.
PREPARE = """
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/python
case "$1" in /root/*)
  mount --bind "$1" /mnt/python
  mount -t tmpfs -o mode=755 tmpfs /root
  mkdir -p "$1"
  mount --bind /mnt/python "$1";;
esac
findmnt -rno TARGET | grep -vE '^/(proc|sys|dev)' | while read -r place; do
  mount -o remount,bind,ro "$place" 2> /dev/null || true
done
for place in /tmp /dev/shm /home; do mount -t tmpfs tmpfs "$place"; done
mkdir -m 1777 -p /home/diptych
chmod 1777 /tmp /dev/shm
cd /home/diptych
if touch "$2/written" 2> /dev/null; then echo "$2 can be written to"; exit 1; fi
shift 2
exec setpriv "$@"
"""
ROOT = Path(__file__).parents[2]
[ROUTER] = [pod for pod in pods(objects("default")) if pod.component == "router"]
WRITABLE = {"/tmp", "/dev/shm", "/home/diptych"}
PROBE = "import subprocess, sys, diptych; subprocess.run([sys.executable, '-c', ''], check=True)"


def privileges() -> list[str]:
    """Flags of setpriv for what the pods' security contexts say."""
    whole, own = ROUTER.spec["securityContext"], ROUTER.container["securityContext"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert own["allowPrivilegeEscalation"] is False
    flags = [f"--reuid={whole['runAsUser']}", f"--regid={whole['runAsGroup']}", f"--groups={whole['fsGroup']}"]
    return [*flags, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


def confined(*command: str) -> list[str]:
    prepare = ["bash", "-ec", PREPARE, "-", sys.base_prefix, str(ROOT)]
    return ["unshare", "--mount", *prepare, *privileges(), "--", *command]


@contextmanager
def serving() -> "Iterator[subprocess.Popen[str]]":
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "DIPTYCH_", "XDG_"))}
    process = subprocess.Popen(
        confined(*CLI, "serve", MODEL, "--http-port", "0", "--grpc-port", "0", "--kv-memory", "64MiB"),
        env=env | {"HOME": "/home/diptych", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_pods_write_nowhere_else() -> None:
    mounts = {m["mountPath"] for m in ROUTER.container["volumeMounts"] if not m.get("readOnly")}
    assert mounts == WRITABLE
    assert ROUTER.container["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_cluster_serves_without_rights() -> None:
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "findmnt"))):
        pytest.skip("needs root, to mount and to become another user")
    probe = confined(sys.executable, "-c", PROBE)
    if (run := subprocess.run(probe, capture_output=True, text=True, check=False, timeout=END_S)).returncode:
        pytest.skip(f"another user cannot run the code here: {run.stdout}{run.stderr}")
    with serving() as process:
        output = output_until_ready(process)
        url = next(line.split("HTTP ")[1].split("/v1")[0] for line in output if "HTTP http" in line)
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "A", "max_tokens": 8}, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert httpx.get(f"{url}/health/decode", timeout=60).json()["status"] == "ready"
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        assert {number for name in ("Uid", "Gid") for number in status[name].split()} == {"10001"}
        assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")} == {0}
        assert int(status["NoNewPrivs"]) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
