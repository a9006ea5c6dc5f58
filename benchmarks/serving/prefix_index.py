"""Rates and memory of a router's prefix index, with millions of blocks.

    python -m benchmarks.serving.prefix_index [--workers 100] [--blocks 10000000] [--json F.json]

Each worker sends its blocks as a router gets them when it joins (one snapshot), then as steps send them: messages of
16 blocks that are new and 16 that have gone, decoded from their bytes before the clock starts. An update is one name
added or removed. A lookup names the blocks of a prompt, and finds which workers hold how much of it: of a prompt that
none holds, and of one that eight hold half of. Bytes for each block: what the process has grown by, divided by the
blocks; `kept`: of the index with all its recent changes in its tables. One core, processor time;
microseconds are medians.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from diptych.cluster.routing.prefix_index import PrefixIndex
from diptych.proto import worker_pb2
from diptych.workers.core.prefix_cache import block_hashes

BLOCK_SIZE, NAMES = 16, 16  # tokens of a block; names added by a message, and as many removed
PROMPTS = (100, 1_000, 10_000)  # tokens
NUM_HOLDERS = 8
CHANGED_SHARE = 4  # one of so many blocks of a worker is replaced by small messages


def names_of(rng: random.Random, num: int) -> list[bytes]:
    whole = rng.randbytes(num * 16)
    return [whole[i : i + 16] for i in range(0, len(whole), 16)]


def decoded(**fields: Any) -> worker_pb2.BlockEvents:
    """Message as the wire brings it."""
    return worker_pb2.BlockEvents.FromString(worker_pb2.BlockEvents(**fields).SerializeToString())


def timed(work: Callable[[], object]) -> float:
    """Processor time of `work`, s: other processes of the machine do not count."""
    began = time.process_time()
    work()
    return time.process_time() - began


def changes(rng: random.Random, held: list[bytes]) -> Iterator[worker_pb2.BlockEvents]:
    for start in range(0, len(held) // CHANGED_SHARE, NAMES):
        yield decoded(stored=names_of(rng, NAMES), removed=held[start : start + NAMES])


def fill(index: PrefixIndex, num_workers: int, num_blocks: int, rng: random.Random) -> dict[str, float]:
    """Send each worker's snapshot and changes. Returns updates a second of both."""
    each = num_blocks // num_workers
    snapshot_s, change_s, num_changes = 0.0, 0.0, 0
    for i in range(num_workers):
        held = names_of(rng, each)
        snapshot = decoded(stored=held, cleared=True)
        snapshot_s += timed(lambda i=i, snapshot=snapshot: index.apply(f"w{i}", snapshot, each))
        messages = list(changes(rng, held))
        began = time.process_time()
        for message in messages:
            index.apply(f"w{i}", message, each + NAMES)
        change_s += time.process_time() - began
        num_changes += 2 * NAMES * len(messages)
        del held, messages
    return {
        "snapshot_updates_per_s": num_workers * each / snapshot_s,
        "updates_per_s": num_changes / change_s,
    }


def lookups(index: PrefixIndex, num_workers: int, rng: random.Random, repeats: int) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    for num_tokens in PROMPTS:
        row: dict[str, float] = {"tokens": num_tokens}
        for kind in ("unknown", "half_held"):
            whole_s: list[float] = []
            match_s: list[float] = []
            for _ in range(repeats):
                tokens = [rng.randrange(1 << 17) for _ in range(num_tokens)]
                names = block_hashes(tokens, BLOCK_SIZE)
                if kind == "half_held":
                    message = decoded(stored=names[: len(names) // 2])
                    for worker in rng.sample(range(num_workers), min(NUM_HOLDERS, num_workers)):
                        index.apply(f"w{worker}", message, 1 << 40)
                match_s.append(timed(lambda names=names: index.match(names)))
                whole_s.append(timed(lambda tokens=tokens: index.cached_tokens(tokens, (BLOCK_SIZE,), b"")))
            row[f"{kind}_match_us"] = statistics.median(match_s) * 1e6
            row[f"{kind}_us"] = statistics.median(whole_s) * 1e6
        rows.append(row)
    return rows


def resident_bytes() -> int:
    """Memory of the process, once what it does not use any more has gone back to the kernel."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def measure(num_workers: int, num_blocks: int, repeats: int, seed: int = 0) -> dict[str, Any]:
    rng = random.Random(seed)
    before = resident_bytes()
    index = PrefixIndex(2 * num_blocks)
    result: dict[str, Any] = {"workers": num_workers, "blocks": num_blocks}
    result |= fill(index, num_workers, num_blocks, rng)
    result["bytes_per_block"] = (resident_bytes() - before) / len(index)
    result["kept_bytes_per_block"] = index.num_table_bytes / len(index)
    result["lookups"] = lookups(index, num_workers, rng, repeats)
    for i in range(num_workers):
        index.drop(f"w{i}")
    result["bytes_per_block_left"] = (resident_bytes() - before) / num_blocks
    return result


def report(result: dict[str, Any]) -> str:
    lines = [
        f"{result['workers']} workers, {result['blocks']} blocks",
        f"updates a second: {result['updates_per_s']:.3g} by messages of {NAMES} + {NAMES} names, "
        f"{result['snapshot_updates_per_s']:.3g} by snapshots",
        f"bytes for each block: {result['bytes_per_block']:.1f}, of them {result['kept_bytes_per_block']:.1f} in "
        f"tables; {result['bytes_per_block_left']:.1f} once all workers have left",
    ]
    for row in result["lookups"]:
        lines.append(
            f"prompt of {row['tokens']:>6} tokens: held by none {row['unknown_us']:.0f} us "
            f"(of it the index {row['unknown_match_us']:.0f}), half of it by {NUM_HOLDERS} workers "
            f"{row['half_held_us']:.0f} us ({row['half_held_match_us']:.0f})"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = measure(args.workers, args.blocks, args.repeats)
    print(report(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
