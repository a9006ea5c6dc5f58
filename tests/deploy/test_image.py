"""The images as they are built: of a base made here, run as the pods of deploy/kubernetes run them.

`make image-test`. Nothing is fetched from a registry: debootstrap makes the base, of Debian's packages.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..support.cluster_harness import output_until_ready
from ..support.owned_folders import WITH_ITS_CALLER, temporary_folder
from .dockerfile import ROOT
from .manifests import objects, pods

NEEDED = ("buildah", "debootstrap", "unshare", "nsenter", "setpriv")
LACKING = [name for name in NEEDED if not shutil.which(name)] + (["root"] if os.geteuid() else [])
pytestmark = [
    pytest.mark.image,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(LACKING), reason=f"an image cannot be built here without {', '.join(LACKING)}"),
]
CHROOT = shutil.which("chroot") or "chroot"  # the PATH within has no /usr/sbin
SUITE, MIRROR = "bookworm", "http://deb.debian.org/debian"
[ROUTER] = [pod for pod in pods(objects("default")) if pod.component == "router"]
WRITABLE = [m["mountPath"] for m in ROUTER.container["volumeMounts"] if not m.get("readOnly")]
QUESTION, ANSWER = "What is Diptych?", "Diptych is a system that serves large language models"
# $1: the image's files. They are read-only; where pods may write, memory is mounted.
ENTER = """
ip link set lo up
mount --make-rprivate /
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
mount -t proc proc "$1/proc"
mount -t tmpfs tmpfs "$1/dev"
for device in null zero random urandom; do touch "$1/dev/$device"; mount --bind "/dev/$device" "$1/dev/$device"; done
mkdir "$1/dev/shm"
for place in {writable}; do mount -t tmpfs -o mode=1777 tmpfs "$1$place"; done
root=$1; shift
exec chroot "$root" "$@"
"""
ASK = f"""
import json, os, urllib.request
body = {{"model": "tiny", "temperature": 0, "messages": [{{"role": "user", "content": "{QUESTION}"}}]}}
headers = {{"content-type": "application/json", "authorization": "Bearer " + os.environ["DIPTYCH_API_KEY"]}}
url = "http://127.0.0.1:8000/v1/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
print(json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]["message"]["content"])
"""
KEY = "a-key-that-only-this-test-uses-0123456789"


@dataclass(frozen=True)
class Store:
    """Images of this test alone."""

    folder: Path

    @property
    def buildah(self) -> list[str]:
        return ["buildah", "--root", str(self.folder / "root"), "--runroot", str(self.folder / "run")]

    def run(self, *arguments: str) -> str:
        done = subprocess.run([*self.buildah, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def build(self, file: str, tag: str, wheels: Path, **arguments: str) -> None:
        given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        pip = ["--build-arg", "PIP=--no-index --find-links /wheels", "--volume", f"{wheels}:/wheels:ro"]
        kind = ["--isolation", "chroot", "--format", "docker"]
        self.run("build", *kind, *pip, *given, "--file", f"deploy/docker/{file}", "--tag", tag, ".")

    @contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """Files of an image."""
        container = self.run("from", "--pull-never", image)
        try:
            yield Path(self.run("mount", container))
        finally:
            self.run("rm", container)

    def settings(self, image: str) -> dict[str, Any]:
        """What the image says of how it is run."""
        return json.loads(self.run("inspect", "--type", "image", image))["Docker"]["config"]


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    """Holds the base."""
    with temporary_folder("images") as folder:
        found = Store(folder)
        command = ["debootstrap", "--variant=minbase", SUITE, str(folder / "base"), MIRROR]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        container = found.run("from", "scratch")
        found.run("add", "--quiet", container, str(folder / "base"), "/")
        found.run("commit", "--quiet", "--rm", "--format", "docker", container, "base")
        try:
            yield found
        finally:
            found.run("rmi", "--all", "--force")


@pytest.fixture(scope="module")
def image(store: Store) -> str:
    """The image for CPUs, made as `make image` makes it."""
    build = " ".join([*store.buildah, "build --isolation chroot --format docker"])
    command = ["make", "image", f"BUILD={build}", "BASE=localhost/base", "TAG=cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return "localhost/cpu"


def confined(settings: dict[str, Any]) -> list[str]:
    """Command that gives another one the rights and the variables of a pod."""
    whole, own = ROUTER.spec["securityContext"], ROUTER.container["securityContext"]
    assert own["capabilities"] == {"drop": ["ALL"]} and own["readOnlyRootFilesystem"] is True
    assert settings["User"] == str(whole["runAsUser"])
    user = [f"--reuid={whole['runAsUser']}", f"--regid={whole['runAsGroup']}", f"--groups={whole['fsGroup']}"]
    variables = [*settings["Env"], f"HOME={settings['WorkingDir']}", f"DIPTYCH_API_KEY={KEY}"]
    rights = ["setpriv", *user, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--"]
    return [*rights, "env", "-i", f"--chdir={settings['WorkingDir']}", *variables]


@contextmanager
def running(root: Path, settings: dict[str, Any]) -> "Iterator[tuple[subprocess.Popen[str], list[str]]]":
    """Run the image's own command; give its process, and the command that runs others beside it."""
    spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
    enter = ["sh", "-euc", ENTER.format(writable=" ".join(WRITABLE)), "-", str(root)]
    command = [*confined(settings), *settings["Entrypoint"], *settings["Cmd"]]
    process = subprocess.Popen(
        [*WITH_ITS_CALLER, "unshare", *spaces, *enter, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output_until_ready(process)
        [first] = psutil.Process(process.pid).children()
        inside = ["nsenter", f"--target={first.pid}", "--net", "--mount", "--uts", "--ipc", "--pid", "--root"]
        yield process, [*inside, *confined(settings)]
        first.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_the_image_serves_without_rights_and_with_a_read_only_root(store: Store, image: str) -> None:
    settings = store.settings(image)
    with store.mounted(image) as root, running(root, settings) as (_, beside):
        ask = subprocess.run([*beside, "python", "-c", ASK], capture_output=True, text=True, check=True)
        assert ask.stdout.startswith(ANSWER)
        kind, *check = settings["Healthcheck"]["Test"]
        assert kind == "CMD"
        subprocess.run([*beside, *check], check=True)
        for command in (["touch", "/opt/diptych/written"], ["python", "-c", "open('/written', 'w')"]):
            refused = subprocess.run([*beside, *command], capture_output=True, text=True, check=False)
            assert refused.returncode and "Read-only file system" in refused.stderr
        status = subprocess.run([*beside, "diptych", "status", "--json"], capture_output=True, text=True, check=True)
        assert {worker["phase"] for worker in json.loads(status.stdout)["workers"]} == {"ready"}


def test_the_image_says_what_is_in_it(store: Store, image: str) -> None:
    with store.mounted(image) as root:
        bill = json.loads((root / "opt/diptych/sbom.cdx.json").read_text())
        found = {part["name"]: part.get("version") for part in bill["components"]}
        assert bill["bomFormat"] == "CycloneDX"
        listing = [CHROOT, str(root), "/opt/diptych/bin/pip", "list", "--format", "json"]
        listed = subprocess.run(listing, capture_output=True, text=True, check=True, env={"HOME": "/", "PATH": "/bin"})
        assert {each["name"]: each["version"] for each in json.loads(listed.stdout)}.items() <= found.items()
        assert not [name for name in ("gcc", "g++", "cc", "make") if (root / "usr/bin" / name).exists()]
        assert (root / "var/lib/dpkg/status").exists()  # what Debian's packages are
        size = sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir()) / 2**20
        print(f"the image has {size:.0f} MiB, of {len(found)} Python packages")


def test_the_image_for_gpus_is_built_by_the_same_steps(store: Store, image: str) -> None:
    """Of the same base and lock as the other, for want of its own: each of its instructions runs."""
    assert image
    store.build("cuda.Dockerfile", "cuda", ROOT / "build" / "wheels", BASE="localhost/base", LOCK="cpu.lock")
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in store.settings("localhost/cuda")["Env"]
    with store.mounted("localhost/cuda") as root:
        compiled = [CHROOT, str(root), "g++", "-fsyntax-only", "-x", "c++", "/usr/include/python3.11/Python.h"]
        subprocess.run(compiled, check=True, env={"PATH": "/usr/bin:/bin"})


def test_wheels_that_are_not_the_locked_ones_are_refused(tmp_path: Path) -> None:
    """As `make image` fetches them."""
    text = (ROOT / "deploy" / "docker" / "sbom.lock").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("packageurl-python==")]
    (lock := tmp_path / "wrong.lock").write_text(f"{line.rstrip(chr(92))} --hash=sha256:{'0' * 64}\n")
    command = [sys.executable, "deploy/docker/wheels.py", str(lock), "3.11", "36", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode and "DO NOT MATCH THE HASHES" in done.stderr
