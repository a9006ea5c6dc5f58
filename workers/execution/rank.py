"""One rank of a worker, other than its first; rank_processes.py starts it.

    python -m diptych.workers.execution.rank SETTINGS

    read our share -> say READY, and hear GO -> join the others -> map the shared KV memory, or make our own GPU's
        -> for ever: hear a step, embed our part of its tokens, run the layers, give rank 0 our part of the logits

It serves nobody: it ends when it is killed, when the worker's own process is gone, or when a rank does not do its part.
"""

import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NoReturn

import torch

from ...kernels.cpu.library import library
from ..common.cores import bind_this_thread, part_of
from ..common.errors import DiptychError, RankLost
from ..common.parent_process import end_with_parent
from ..device.cuda_device import gpu_named
from ..device.device import Device
from ..device.device_group import device_rendezvous
from ..device.joined_memory import Joining
from ..device.kv_cache import KVCache, available_bytes
from ..device.upload import put_on
from ..device.virtual_memory import virtual_memory_of
from ..models.checkpoint.weights import DTYPES, Checkpoint, load_weights
from ..models.families.registry import load_spec
from ..models.families.spec import ModelSpec
from ..models.layers.decoder import Decoder
from ..models.layers.rope import Ropes, rope_tables
from ..models.layers.step import Int32s, Step, StepLimits, receive_message
from ..models.plan.kv_plan import layout_of
from ..models.plan.rank_settings import GO, READY, RankSettings
from ..models.plan.sharding import Share, spec_of
from ..parallel.groups import GlooGroup, Group
from .cpu.compiled import CompiledDecoder, read_weights
from .cpu.cpu_kernels import choose, make_team
from .gpu.rank_steps import RankSteps

CHECK_S = 1.0


def follow(settings: RankSettings, life_line: int) -> None:
    """life_line: of a pipe to rank 0. Does not return. Raises RankLost, or what reading a checkpoint raises."""
    torch.set_num_threads(settings.num_threads)
    bind_this_thread(part_of(settings.cores, settings.rank, settings.size))
    gpu = gpu_named(settings.device, settings.rank)
    device = gpu.torch_device if gpu is not None else torch.device("cpu")
    path, share = Path(settings.model_path), settings.share
    spec = load_spec(path)
    with Checkpoint(path, spec) as checkpoint:
        compute_with = _read_share(settings, spec, checkpoint, share, gpu)
    os.write(life_line, READY)
    link = socket.socket(fileno=settings.link_fd)
    if link.recv(len(GO)) != GO:
        raise RankLost("the worker of this rank is gone")
    rendezvous = Path(settings.rendezvous)
    group = control_group = GlooGroup.join(settings.rank, settings.size, rendezvous)
    if settings.sums_fd is not None:
        compiled = library()
        assert compiled is not None  # rank 0 has it
        control_group.share(compiled, settings.sums_fd)
    if gpu is not None:
        group = gpu.group(settings.rank, settings.size, device_rendezvous(rendezvous))
        control_group.gather(torch.tensor([available_bytes(device)]), [(1,)] * settings.size)
    [num_blocks] = receive_message(control_group).tolist()
    layout = layout_of(
        spec,
        settings.dtype,
        settings.block_size,
        axis_order=settings.axis_order,
        tensor_parallel=settings.size,
        packing=settings.packing,
    )
    memory = virtual_memory_of(gpu) if gpu is not None else None
    shared = settings.memory_fd if memory is None else Joining(memory, [link])
    cache = KVCache(layout, num_blocks, device, rank=settings.rank, shared=shared)
    compute = compute_with(cache, rope_tables(spec, settings.max_context_tokens, device), group)
    link.close()
    control_group.meet()  # everyone is here: rank 0 may serve
    for message in _messages(control_group) if gpu is None else _messages_ahead(control_group, gpu):
        compute(message)


def _messages(control_group: Group) -> Iterator[Int32s]:
    while True:
        yield receive_message(control_group)


def _messages_ahead(control_group: Group, gpu: Device) -> Iterator[Int32s]:
    """Step messages, received on a thread of their own: rank 0 broadcasts a step before the previous one is computed,
    and does not wait. While no message comes, `gpu` is checked, for other ranks may wait for it. Raises its error."""
    received: SimpleQueue[Int32s | Exception] = SimpleQueue()

    def listen() -> None:
        try:
            for each in _messages(control_group):
                received.put(each)
        except Exception as e:  # noqa: BLE001 - raised by the consumer
            received.put(e)

    threading.Thread(target=listen, name="diptych-messages", daemon=True).start()
    while True:
        try:
            each = received.get(timeout=CHECK_S)
        except Empty:
            gpu.check()
            continue
        if isinstance(each, Exception):
            raise each
        yield each


def _read_share(
    settings: RankSettings, spec: ModelSpec, checkpoint: Checkpoint, share: Share, gpu: Device | None
) -> Callable[[KVCache, Ropes, Group], Callable[[Int32s], object]]:
    """What computes the steps of this rank, as they are heard, once it has a cache, the rotary table and a group."""
    cpu, dtype, ours = torch.device("cpu"), DTYPES[settings.dtype], spec_of(spec, share)
    if gpu is not None:
        return _read_to_gpu(settings, ours, checkpoint, share, gpu)

    def steps_of(cache: KVCache, compute: Callable[[Step], object]) -> Callable[[Int32s], object]:
        limits = StepLimits(settings.block_size, cache.num_blocks, settings.max_context_tokens, spec.vocab_size)
        return lambda message: compute(Step.from_message(message, limits))

    chosen = choose(settings.cpu_isa).library
    if chosen is not None:
        team = make_team(chosen, settings.num_threads, part_of(settings.cores, settings.rank, settings.size))
        packed = read_weights(team, checkpoint.reader(dtype, cpu, share=share, quantize=settings.quantize))
        return lambda cache, cos_sin, group: steps_of(
            cache, CompiledDecoder(ours, packed, cache, cos_sin, team, group).follow
        )
    weights = checkpoint.load(dtype, cpu, share=share, quantize=settings.quantize)

    def by_torch(cache: KVCache, cos_sin: Ropes, group: Group) -> Callable[[Int32s], object]:
        decoder = Decoder(ours, weights, group, share.experts)
        return steps_of(cache, lambda step: decoder.compute(step, cache, cos_sin))

    return by_torch


def _read_to_gpu(
    settings: RankSettings, spec: ModelSpec, checkpoint: Checkpoint, share: Share, gpu: Device
) -> Callable[[KVCache, Ropes, Group], Callable[[Int32s], object]]:
    """See _read_share. spec: of our share."""
    dtype, quantize = DTYPES[settings.dtype], settings.quantize
    with put_on(gpu, quantize) as put:
        reader = checkpoint.reader(dtype, gpu.torch_device, share=share, quantize=quantize, put=put)
        weights = load_weights(reader)

    def steps_with(cache: KVCache, cos_sin: Ropes, group: Group) -> Callable[[Int32s], object]:
        decoder = Decoder(spec, weights, group, share.experts)
        return RankSteps(
            gpu, decoder, cache, cos_sin, None, settings.max_running, graph_tokens=settings.graph_tokens
        ).follow

    return steps_with


def main(argv: list[str]) -> NoReturn:
    # A signal to the whole process group is for rank 0 to act on, which then ends us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings = RankSettings(**json.loads(argv[1]))
    life_line = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # NCCL, for one, writes what it logs to standard output
    try:
        end_with_parent()
        if os.getppid() != settings.parent_pid:
            raise RankLost("the worker of this rank is gone")
        with torch.inference_mode():
            follow(settings, life_line)
    except DiptychError as e:
        print(f"error: rank {settings.rank}: {e}", file=sys.stderr)
    except Exception:  # noqa: BLE001 - whatever it is, the process ends
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # at once: communicators of GPUs end no sooner than the graphs that hold their calls


if __name__ == "__main__":
    main(sys.argv)
