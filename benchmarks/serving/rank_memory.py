"""Measures the memory of each rank of a worker: its share of the weights and of the KV, and what torch itself takes.

    python -m benchmarks.serving.rank_memory --model DIR [--ranks 1 3] [--dtype bfloat16] [--kv-memory-mib 256]

For each number of ranks: a worker, prompts that fill three quarters of its KV memory, and then of every rank, in MiB:
the highest RSS since it began, loading included (of the checkpoint's file, which is mapped, what was read counts);
RSS; PSS (a page that n processes share counts 1/n for each); of it KV, which is one memory file where there are several
ranks; and USS less what a process has that has only imported a rank's modules: weights, buffers, and KV that no other
process has touched.
"""

import argparse
import asyncio
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from diptych.cluster.routing.router import Router
from diptych.proto import worker_pb2, worker_pb2_grpc
from diptych.workers.common.channel import open_channel
from diptych.workers.common.request import Request, SamplingParams

from .chaos import routed, started
from .faults import Worker, worker_command

MIB = 1 << 20
IMPORTS = "import sys, diptych.workers.execution.rank_work; print(flush=True); sys.stdin.read()"
PROMPT_TOKENS = 1000
KV_NAME = "diptych-kv"  # of the memory file


def imported_uss() -> int:
    """Memory (bytes) of a process that has only imported what a rank does."""
    process = subprocess.Popen([sys.executable, "-c", IMPORTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    uss = psutil.Process(process.pid).memory_full_info().uss
    process.communicate()
    return uss


async def fill(router: Router, worker: Worker) -> None:
    async with open_channel(worker.direct_address) as channel:
        state = await worker_pb2_grpc.WorkerStub(channel).GetState(worker_pb2.GetStateRequest())
    block_size = 16
    rng = random.Random(1)
    for number in range(state.load.num_blocks * block_size * 3 // 4 // PROMPT_TOKENS):
        prompt = tuple(rng.randrange(3, 1000) for _ in range(PROMPT_TOKENS))
        request = Request(f"request-{number}", prompt, SamplingParams(temperature=0.0, max_tokens=1), 120.0)
        async for _ in router.stream(request):
            pass


def peak_rss(process: psutil.Process) -> int:
    [line] = [v for v in Path(f"/proc/{process.pid}/status").read_text().splitlines() if v.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def show(num_ranks: int, processes: Sequence[psutil.Process], imported: int) -> None:
    for rank, process in enumerate(processes):
        memory = process.memory_full_info()
        kv = sum(m.pss for m in process.memory_maps() if KV_NAME in m.path)
        figures = (peak_rss(process), memory.rss, memory.pss, kv, memory.uss - imported)
        print(f"{num_ranks:5} {rank:4} " + " ".join(f"{figure / MIB:9.0f}" for figure in figures))


async def measure(model: str, num_ranks: int, flags: Sequence[str], imported: int) -> None:
    worker = Worker("mixed", worker_command(model, "mixed", [*flags, "--tensor-parallel", str(num_ranks)]))
    async with started([worker]), routed(lambda: [worker.info]) as router:
        await fill(router, worker)
        assert worker.process is not None
        first = psutil.Process(worker.process.pid)
        show(num_ranks, [first, *sorted(first.children(), key=lambda p: p.pid)], imported)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-memory-mib", type=int, default=256)
    given = parser.parse_args()
    flags = ["--dtype", given.dtype, "--threads", "1", "--transports", "grpc", "--block-size", "16"]
    flags += ["--kv-memory-bytes", str(given.kv_memory_mib * MIB)]
    imported = imported_uss()
    print(f"imported modules alone: USS {imported / MIB:.0f} MiB")
    print(
        f"{'ranks':>5} {'rank':>4} " + " ".join(f"{name:>9}" for name in ("peak RSS", "RSS", "PSS", "of it KV", "own"))
    )
    for num_ranks in given.ranks:
        asyncio.run(measure(given.model, num_ranks, flags, imported))


if __name__ == "__main__":
    main()
