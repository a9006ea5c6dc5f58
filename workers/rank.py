"""One rank of a worker, other than its first: `python -m diptych.workers.rank SETTINGS`, started by rank_processes.py.

    read our share -> say READY -> join the others -> map the shared KV memory
        -> for ever: hear a step, embed our part of its tokens, run the layers, give rank 0 our part of the logits

It serves nobody: it ends when it is killed, when the worker's own process is gone, or when a rank does not do its part.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..kernels.cpu.library import library
from .cores import bind_this_thread, part_of
from .cpu_kernels import choose, make_team
from .errors import DiptychError, RankLost
from .kv_cache import KVCache
from .kv_plan import layout_of
from .models.compiled import CompiledDecoder, read_weights
from .models.decoder import Decoder
from .models.expert_placement import Placement
from .models.families import load_spec
from .models.rope import Ropes, rope_tables
from .models.sharding import Share, spec_of
from .models.spec import ModelSpec
from .models.weights import DTYPES, Checkpoint
from .parallel import GlooGroup, Group
from .step import Step, StepLimits, hear

READY = b"ready\n"  # on standard output, once the weights are read
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RankSettings:
    model_path: str
    dtype: str
    block_size: int
    axis_order: str  # of kv_layout.py, as packing
    packing: str
    max_context_tokens: int
    num_threads: int
    size: int
    cpu_isa: str = "none"  # of the compiled kernels that compute; "none": torch does
    cores: tuple[int, ...] | None = None  # of all ranks
    quantize: str | None = None
    experts: dict[str, list[list[int]]] | None = None  # Share.experts: by layer, of each rank what it holds
    rank: int = 0
    memory_fd: int = -1
    sums_fd: int | None = None  # memory for sums, by the compiled kernels; None: they go over gloo
    meeting: str = ""
    parent_pid: int = 0

    @property
    def share(self) -> Share:
        if self.experts is None:
            return Share(self.rank, self.size)
        experts = {int(layer): Placement.of(held) for layer, held in self.experts.items()}
        return Share(self.rank, self.size, experts)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def told_of(share: Share) -> dict[str, list[list[int]]] | None:
    """RankSettings.experts."""
    if share.experts is None:
        return None
    return {str(layer): [list(held) for held in of.held] for layer, of in share.experts.items()}


def follow(settings: RankSettings) -> None:
    """Does not return. Raises RankLost, or what reading a checkpoint raises."""
    torch.set_num_threads(settings.num_threads)
    bind_this_thread(part_of(settings.cores, settings.rank, settings.size))
    cpu = torch.device("cpu")
    path, share = Path(settings.model_path), settings.share
    spec = load_spec(path)
    with Checkpoint(path, spec) as checkpoint:
        compute_with = _read_share(settings, spec, checkpoint, share)
    os.write(sys.stdout.fileno(), READY)
    group = GlooGroup.join(settings.rank, settings.size, Path(settings.meeting))
    if settings.sums_fd is not None:
        compiled = library()
        assert compiled is not None  # rank 0 has it
        group.share(compiled, settings.sums_fd)
    [num_blocks] = hear(group).tolist()
    limits = StepLimits(settings.block_size, num_blocks, settings.max_context_tokens, spec.vocab_size)
    layout = layout_of(
        spec,
        settings.dtype,
        settings.block_size,
        axis_order=settings.axis_order,
        tensor_parallel=settings.size,
        packing=settings.packing,
    )
    cache = KVCache(layout, num_blocks, cpu, rank=settings.rank, shared=settings.memory_fd)
    compute = compute_with(cache, rope_tables(spec, settings.max_context_tokens, cpu), group)
    group.all_reduce(torch.ones(1))  # everyone is here: rank 0 may serve
    while True:
        compute(Step.from_words(hear(group), limits))


def _read_share(
    settings: RankSettings, spec: ModelSpec, checkpoint: Checkpoint, share: Share
) -> Callable[[KVCache, Ropes, Group], Callable[[Step], object]]:
    """What computes the steps of this rank, once it has a cache, the rotary table and a group."""
    cpu, dtype, ours = torch.device("cpu"), DTYPES[settings.dtype], spec_of(spec, share)
    chosen = choose(settings.cpu_isa).library
    if chosen is not None:
        team = make_team(chosen, settings.num_threads, part_of(settings.cores, settings.rank, settings.size))
        packed = read_weights(team, checkpoint.reader(dtype, cpu, share=share, quantize=settings.quantize))
        return lambda cache, cos_sin, group: CompiledDecoder(ours, packed, cache, cos_sin, team, group).follow
    weights = checkpoint.load(dtype, cpu, share=share, quantize=settings.quantize)

    def compute_with(cache: KVCache, cos_sin: Ropes, group: Group) -> Callable[[Step], object]:
        decoder = Decoder(ours, weights, group, share.experts)
        return lambda step: decoder.compute(step, cache, cos_sin)

    return compute_with


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before we asked
        raise RankLost("the worker of this rank is gone")


def main(argv: list[str]) -> int:
    # A signal to the whole process group is for rank 0 to act on, which then ends us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings = RankSettings(**json.loads(argv[1]))
    try:
        end_with_parent(settings.parent_pid)
        with torch.inference_mode():
            follow(settings)
    except DiptychError as e:
        print(f"error: rank {settings.rank}: {e}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
