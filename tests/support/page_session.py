"""Commands of the documentation, run as they stand on its pages, by a shell, in the folder of a fresh clone.

A session has Linux namespaces of its own: a network, so that the pages' own ports are free, and processes, which all
end with it. docs_commands.yaml says which sections a session runs, and what it leaves out.
"""

import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .cluster_harness import environment
from .owned_folders import WITH_ITS_CALLER
from .pages import ROOT, SHELLS, Block, all_blocks, plain

PLAN = ROOT / "tests" / "docs_commands.yaml"
LIMIT_S = 840.0  # below that of pytest
OWN = ("deploy",)  # folders that commands write to
# Brings the network up, then becomes the session's script.
ENTER = """
import fcntl, os, socket, struct, sys
with socket.socket() as s:
    fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
os.execvp("bash", ["bash", "-euo", "pipefail", *sys.argv[1:]])
"""


@dataclass(frozen=True)
class Plan:
    """docs_commands.yaml."""

    sessions: dict[str, list[str]]
    long: list[str]
    stands_for: dict[str, str]
    shorter: list[dict[str, str]]
    not_run: list[dict[str, Any]]

    def leaves_out(self, block: Block, command: str) -> bool:
        return any(entry["in"] == block.section and command in entry["commands"] for entry in self.not_run)


@cache
def plan() -> Plan:
    return Plan(**yaml.safe_load(PLAN.read_text()))


def isolation() -> list[str]:
    """Command that gives another one namespaces of its own."""
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    return [*WITH_ITS_CALLER, "unshare", *root, "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def can_be_isolated() -> bool:
    if not (shutil.which("unshare") and shutil.which("setpriv")):
        return False
    return subprocess.run([*isolation(), "true"], capture_output=True, check=False).returncode == 0


def script(block: Block) -> str:
    """Return what the shell reads for a block: its text, without the commands that are left out."""
    text = block.text
    for entry in plan().shorter:
        if entry["in"] == block.section:
            text = text.replace(entry["text"], entry["by"])
    for words, stand_in in plan().stands_for.items():
        text = text.replace(words, stand_in.format(tiny=ROOT / "examples" / "tiny"))
    if block.language not in SHELLS:
        return f"python <<'END OF BLOCK'\n{text}\nEND OF BLOCK"
    written = [line for line in block.text.replace("\\\n", "\0").splitlines() if plain(line.replace("\0", " "))]
    run = [line for line in text.replace("\\\n", "\0").splitlines() if plain(line.replace("\0", " "))]
    kept = [
        after
        for before, after in zip(written, run, strict=True)
        if not plan().leaves_out(block, plain(before.replace("\0", " ")))
    ]
    return "\n".join(kept).replace("\0", "\\\n")


def session_script(name: str) -> str:
    found = {section: [b for b in all_blocks() if b.section == section] for section in plan().sessions[name]}
    parts = [f"echo '== {b.page}:{b.line}'\n{script(b)}" for each in found.values() for b in each]
    return "\n\n".join([*parts, "diptych end-all", ""])


def clone(folder: Path) -> Path:
    """Make what a clone looks like after `make`, of links; return its bin."""
    for path in ROOT.iterdir():
        if path.name in OWN:
            shutil.copytree(path, folder / path.name)
        elif not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    own = folder / ".venv" / "bin"
    own.mkdir(parents=True)
    for name in ("python", "python3"):
        (own / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (own / "diptych").write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/support/page_shell.py "$@"\n')
    for program in own.iterdir():
        program.chmod(0o755)
    for name in (".installed", ".installed-dev"):
        (folder / ".venv" / name).touch()
    return own


def readers_files(folder: Path) -> None:
    """Files that the pages take for granted: traces, requests, a cluster's settings, texts."""
    dice = random.Random(23)
    sizes = [(dice.randint(20, 300), dice.randint(4, 40)) for _ in range(200)]
    rows = [f"2023-11-16 18:{i // 60:02}:{i % 60:02},{a},{b}" for i, (a, b) in enumerate(sizes)]
    azure = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n"
    line = '{{"timestamp": {0}, "input_length": {1}, "output_length": {2}, "hash_ids": [0, {0}]}}\n'
    mooncake = "".join(line.format(1000 * i, 512 + a, b) for i, (a, b) in enumerate(sizes))
    body = '{"model": "tiny", "prompt": "A", "max_tokens": 8}'
    batch = f'{{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {body}}}\n'
    settings = f"model: {ROOT}/examples/tiny\n"
    big = "pools: {mixed: {replicas: 10}}\nrouter: {predict: true, max_requests: 1000000}\n"
    texts = "".join(f'{{"text": "{"Prefill and decode. " * 40}{i}"}}\n' for i in range(8))
    for name, text in {
        "azure.csv": azure,
        "azure_conv.csv": azure,
        "mooncake.jsonl": mooncake,
        "mooncake_conversation.jsonl": mooncake,
        "requests.jsonl": batch,
        "cluster.yaml": settings + "pools: {prefill: {replicas: 1}, decode: {replicas: 1}}\n",
        "big.yaml": settings + big,
        "text.jsonl": texts,
        "changes.yaml": "kv_dtype: int8\n",
    }.items():
        (folder / name).write_text(text)


def run(name: str, folder: Path) -> str:
    """Run a session in an empty folder; return its output. Raises AssertionError, with that, where a command fails."""
    own = clone(folder)
    readers_files(folder)
    (served := folder / "served").mkdir()
    (folder / "session.sh").write_text(session_script(name))
    env = environment(folder / "home", {"DIPTYCH_SERVED": str(served), "HOME": str(folder / "home")})
    env["PATH"] = f"{own}:{env['PATH']}"
    (folder / "home").mkdir()
    command = [*isolation(), sys.executable, "-c", ENTER, "-x", "session.sh"]
    with (folder / "output").open("w") as output:
        done = subprocess.run(
            command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False
        )
    text = (folder / "output").read_text()
    assert done.returncode == 0, text
    return text
