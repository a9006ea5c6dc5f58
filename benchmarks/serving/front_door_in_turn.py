"""Compares front_door.py's figures of several commits on one noisy machine: short windows, in turn, of all at once.

    python -m benchmarks.serving.front_door_in_turn before=TREE after=TREE [--rounds 15] [--flat-s 0.8]
                                                   [--only whole "many requests"]

Each TREE is a checkout with a `.venv` of its own; its own front_door.py serves. Of each figure: the median of the
rounds, its least and largest, and the median of its ratio to the first tree's in the same round. Printed are:

    whole, streamed, chat   one token, one request after the other: median latency, and CPU a request of all processes
    flat out                16 streams of 64 tokens, where a step takes no time: tokens/s, CPU a token of all processes
                            and of the router alone
    many streams            the same with 256 streams of 128 tokens
    many requests           the same with 32 streams of one token: a token is a request
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

NUM_SINGLE = 150
KINDS = ("whole", "streamed", "chat")
# Streams, tokens of each, and how many times as long they run: connecting is a part of it.
FLAT_OUT = {"flat out": (16, 64, 1), "many streams": (256, 128, 4), "many requests": (32, 1, 1)}
Figures = dict[str, float]


def request(kind: str, prompt: str) -> bytes:
    body: dict[str, object] = {"model": "fake", "max_tokens": 1, "ignore_eos": True, "stream": kind != "whole"}
    body |= {"messages": [{"role": "user", "content": prompt}]} if kind == "chat" else {"prompt": prompt}
    content = json.dumps(body).encode()
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


async def singles(port: int, kind: str, prompt: str) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent, end = request(kind, prompt), b"}}" if kind == "whole" else b"\r\n0\r\n\r\n"
    found: list[float] = []
    for _ in range(NUM_SINGLE):
        began = time.perf_counter()
        writer.write(sent)
        answer = b""
        while not answer.endswith(end):
            answer += await reader.read(1 << 16)
        found.append(time.perf_counter() - began)
        assert answer.startswith(b"HTTP/1.1 200"), answer
    writer.close()
    return found


def children(pid: int) -> list[int]:
    lists = [(task / "children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(child) for found in lists for child in found]


def serve(front_door: ModuleType, cpu_of: Callable[[int], float]) -> None:
    """Run in a tree's own process: answer each line of standard input, a kind and seconds, with figures."""
    served = front_door.Served(0.0)

    def cpu_s() -> float:
        return sum(cpu_of(pid) for pid in (served.router_pid, served.worker_pid, *children(served.router_pid)))

    print("{}", flush=True)
    for line in sys.stdin:
        kind, seconds = json.loads(line)
        before, router_before = cpu_s(), cpu_of(served.router_pid)
        if kind in FLAT_OUT:
            number, num_tokens, times = FLAT_OUT[kind]
            done, took_s = asyncio.run(front_door.streams(served.port, number, num_tokens, times * seconds))
            router_s = cpu_of(served.router_pid) - router_before
            figures = {
                "tokens/s": done / took_s,
                "CPU us a token": (cpu_s() - before) / done * 1e6,
                "router us a token": router_s / done * 1e6,
            }
        else:
            took = asyncio.run(singles(served.port, kind, front_door.PROMPT))
            cpu_us = (cpu_s() - before) / NUM_SINGLE * 1e6
            figures = {"median ms": statistics.median(took) * 1e3, "CPU us a request": cpu_us}
        print(json.dumps(figures), flush=True)
    served.close()


class Tree:
    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        command = [str(folder / ".venv/bin/python"), str(Path(__file__).resolve()), "--serve", str(folder)]
        self._process = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def measure(self, kind: str, seconds: float) -> Figures:
        assert self._process.stdin is not None
        print(json.dumps([kind, seconds]), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _answer(self) -> Figures:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def scripts_of(tree: Path) -> tuple[ModuleType, Callable[[int], float]]:
    """The tree's front_door.py, and its function for the CPU seconds of a process. Older trees have no folders."""
    is_flat = (tree / "benchmarks" / "front_door.py").exists()
    sys.path.insert(0, str(tree / "benchmarks" if is_flat else tree))
    serving, common = ("", "") if is_flat else ("benchmarks.serving.", "benchmarks.common.")
    return import_module(f"{serving}front_door"), import_module(f"{common}cpu_time").process_s


def show(kind: str, rounds: list[dict[str, Figures]]) -> None:
    """`rounds`: by name of the tree."""
    first = next(iter(rounds[0]))
    for figure in rounds[0][first]:
        for name in rounds[0]:
            values = [each[name][figure] for each in rounds]
            ratio = statistics.median(each[name][figure] / each[first][figure] for each in rounds)
            print(f"{kind:13} {figure:17} {name:8} {statistics.median(values):9.2f}  [{min(values):.2f}, "
                  f"{max(values):.2f}]  x {ratio:.3f}", flush=True)  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("trees", nargs="*", metavar="NAME=TREE")
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--flat-s", type=float, default=0.8)
    p.add_argument("--only", nargs="+", choices=(*KINDS, *FLAT_OUT), default=(*KINDS, *FLAT_OUT), metavar="NAME")
    p.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.serve:
        serve(*scripts_of(a.serve))
        return
    trees = [Tree(name, Path(folder)) for name, _, folder in (each.partition("=") for each in a.trees)]
    found: dict[str, list[dict[str, Figures]]] = {kind: [] for kind in a.only}
    for i in range(a.rounds + 1):
        for kind, rounds in found.items():
            order = trees if i % 2 else trees[::-1]
            measured = {tree.name: tree.measure(kind, a.flat_s) for tree in order}
            if i:  # the first warms up
                rounds.append({tree.name: measured[tree.name] for tree in trees})
    for tree in trees:
        tree.close()
    for kind, rounds in found.items():
        show(kind, rounds)


if __name__ == "__main__":
    main()
