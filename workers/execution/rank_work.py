"""Work of a worker's rank other than 0, in the process of rank.py.

read this rank's weights -> send READY, receive GO -> join the other ranks -> map or make KV memory
    -> repeat: receive a step message, of the model or of what drafts, compute this rank's part, send rank 0 its
       part of the logits
"""

import os
import socket
from contextlib import ExitStack
from pathlib import Path

import torch

from ..common.cores import bind_this_thread, part_of
from ..common.errors import RankLost
from ..models.checkpoint.weights import Checkpoint
from ..models.families.registry import load_spec
from ..models.layers.rope import rope_tables
from ..models.plan.rank_settings import GO, READY, RankSettings
from ..ranks.rank_member import RankMember
from .common.backend import StepResources, no_progress
from .draft.draft_ranks import DraftShare
from .factory import backend_of_rank


@torch.inference_mode()
def follow(settings: RankSettings, life_line: int, go_line: int) -> None:
    """life_line, go_line: of pipes to and from whoever started this rank. Does not return. Raises RankLost, or what
    reading a checkpoint raises."""
    torch.set_num_threads(settings.num_threads)
    bind_this_thread(part_of(settings.cores, *settings.place_on_machine))
    path = Path(settings.model_path)
    spec = load_spec(path)
    loader = backend_of_rank(settings)
    with Checkpoint(path, spec) as checkpoint:
        weights = loader.load(checkpoint, settings.share, no_progress)
    draft = DraftShare.load(settings, loader, spec, weights)
    step_bytes = weights.step_bytes()  # compiles kernels, which takes longer than the others may wait for us later
    os.write(life_line, READY)
    if os.read(go_line, len(GO)) != GO:
        raise RankLost("the worker of this rank has ended")
    with ExitStack() as stack:
        fds = settings.peer_fds if settings.link_fd < 0 else [settings.link_fd]
        links = [stack.enter_context(socket.socket(fileno=fd)) for fd in fds]
        member = RankMember(settings, links, loader.gpu, step_bytes)
        shared = member.shared()
        cache = loader.make_cache(settings.layout, member.num_blocks(), settings.rank, shared, settings.machine_ranks)
        member.serve_reads(cache, shared)
        member.serve_machine_kv(cache)
        cos_sin = rope_tables(spec, settings.max_context_tokens, loader.torch_device)
        resources = StepResources(cache, cos_sin, member.group)
        compute = weights.follow(resources)
        if draft is not None:
            member.begin_draft()
            compute = draft.follow(compute, resources)
    member.meet()  # all ranks are ready: rank 0 may serve
    for message in member.messages():
        compute(message)
