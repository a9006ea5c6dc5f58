"""Process of a worker's rank other than 0; rank_processes.py starts it.

    python -m diptych.workers.execution.rank SETTINGS

    read this rank's weights -> send READY, receive GO -> join the other ranks -> map or make KV memory
        -> repeat: receive a step message, of the model or of what drafts, compute this rank's part, send rank 0 its
           part of the logits

It ends when it is killed, when the worker's process is gone, or when another rank does not do its part.
"""

import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import torch

from ..common.cores import bind_this_thread, part_of
from ..common.errors import DiptychError, RankLost
from ..common.parent_process import end_with_parent
from ..models.checkpoint.weights import Checkpoint
from ..models.families.registry import load_spec
from ..models.layers.rope import rope_tables
from ..models.plan.rank_settings import GO, READY, RankSettings
from ..ranks.rank_member import RankMember
from .common.backend import StepResources, no_progress
from .draft.draft_ranks import DraftShare
from .factory import backend_of_rank


def follow(settings: RankSettings, life_line: int) -> None:
    """life_line: of a pipe to rank 0. Does not return. Raises RankLost, or what reading a checkpoint raises."""
    torch.set_num_threads(settings.num_threads)
    bind_this_thread(part_of(settings.cores, settings.rank, settings.size))
    path = Path(settings.model_path)
    spec = load_spec(path)
    loader = backend_of_rank(settings)
    with Checkpoint(path, spec) as checkpoint:
        weights = loader.load(checkpoint, settings.share, no_progress)
    draft = DraftShare.load(settings, loader, spec, weights)
    step_bytes = weights.step_bytes()  # compiles kernels, which takes longer than the others may wait for us later
    os.write(life_line, READY)
    with socket.socket(fileno=settings.link_fd) as link:
        if link.recv(len(GO)) != GO:
            raise RankLost("the worker of this rank has ended")
        member = RankMember(settings, link, loader.gpu, step_bytes)
        shared = member.shared()
        cache = loader.make_cache(settings.layout, member.num_blocks(), settings.rank, shared)
        member.serve_reads(cache, shared)
        cos_sin = rope_tables(spec, settings.max_context_tokens, loader.torch_device)
        resources = StepResources(cache, cos_sin, member.group)
        compute = weights.follow(resources)
        if draft is not None:
            compute = draft.follow(compute, resources)
    member.meet()  # all ranks are ready: rank 0 may serve
    for message in member.messages():
        compute(message)


def main(argv: list[str]) -> NoReturn:
    # A signal to the whole process group is for rank 0 to act on, which then ends us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings = RankSettings.from_json(argv[1])
    life_line = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # NCCL, for example, logs to standard output
    try:
        end_with_parent()
        if os.getppid() != settings.parent_pid:
            raise RankLost("the worker of this rank has ended")
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
