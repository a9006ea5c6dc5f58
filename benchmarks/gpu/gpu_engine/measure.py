"""Figures of one rig: decode steps, prompts, requests by the hundred. All go through the engine, as a worker's do."""

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from diptych.workers.common.errors import DiptychError
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.common.timings import PullTimes
from diptych.workers.engine.engine import Engine
from diptych.workers.handoff.types import Reservation, Seal
from diptych.workers.kv.layout import ROWS
from diptych.workers.models.checkpoint.weights import DTYPES

from ...common.roofline import ModelCost, Roofline
from .report import Figure
from .rig import Rig
from .timed import idle_s

TIMEOUT_S = 3600.0
WARMUP_STEPS = 8


@dataclass(frozen=True)
class DecodeCase:
    batch: int
    context: int
    num_steps: int = 48  # timed, and as many again with notes of when the device worked

    def __str__(self) -> str:
        return f"batch {self.batch}, context {self.context}"


@dataclass(frozen=True)
class PromptCase:
    num_prompts: int
    num_tokens: int
    repeat: int = 5

    def __str__(self) -> str:
        return f"{self.num_prompts} prompt{'s' * (self.num_prompts > 1)} of {self.num_tokens}"


@dataclass(frozen=True)
class ServingCase:
    num_requests: int
    num_prompt: int
    num_new: int

    def __str__(self) -> str:
        return f"{self.num_requests} requests, {self.num_prompt} in, {self.num_new} out"


def cost_of(rig: Rig) -> ModelCost:
    layout, dtype = rig.runner.layout, rig.settings.dtype
    kv_share = layout.block_bytes / replace(layout, dtype=dtype, packing=ROWS).block_bytes
    return ModelCost(rig.spec, DTYPES[dtype].itemsize, rig.product_bytes, kv_share)


def decode(rig: Rig, case: DecodeCase, limits: Roofline) -> Iterator[Figure]:
    """Measure decoding; yield nothing where the KV does not fit. The sequences come with random KV, as to a decode
    worker."""
    engine = rig.engine
    num_tokens = case.context + WARMUP_STEPS + 2 * case.num_steps + 4
    if not fits(rig, case.batch, num_tokens):
        return
    keys = arrive(rig, case, num_tokens - case.context)
    for _ in range(WARMUP_STEPS):
        engine.step()
    began = time.perf_counter()
    for _ in range(case.num_steps):
        assert len(engine.step().tokens) == case.batch
    step_s = (time.perf_counter() - began) / case.num_steps
    spans = rig.device.take(lambda: [engine.step() for _ in range(case.num_steps)])
    leave(engine, keys)
    cost, context = cost_of(rig), case.context + WARMUP_STEPS + case.num_steps // 2
    weights_s = cost.decode_bytes(case.batch, 0) / limits.read_bytes_s
    limit = "weight bytes ÷ copy bandwidth"
    yield Figure("decode step", str(case), 1e3 * step_s, "ms", weights_s / step_s, limit)
    share = cost.decode_share(limits, case.batch, context, step_s)
    yield Figure("decode", str(case), case.batch / step_s, "tokens/s", share, "what weights, KV and products allow")
    idle = idle_s(spans)
    whole = max((end for _, end in spans), default=0.0)
    yield Figure(
        "host gap a step", str(case), 1e6 * idle / case.num_steps, "µs", idle / whole if whole else None, "the step"
    )


def prompts(rig: Rig, case: PromptCase, limits: Roofline) -> Iterator[Figure]:
    """Measure prompts, from the first step to the last of the first tokens."""
    if not fits(rig, case.num_prompts, case.num_tokens + 1):
        return
    seconds: list[float] = []
    for i in range(-1, case.repeat):  # the first warms up
        submit_prompts(rig, case, seed=i + 1)
        began = time.perf_counter()
        num_first = 0
        while num_first < case.num_prompts:
            num_first += len(rig.engine.step().tokens)
        if i >= 0:
            seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    num_flops = case.num_prompts * cost_of(rig).prefill_flops(case.num_tokens)
    share = limits.share_of_multiplying(num_flops, median)
    yield Figure("prefill", str(case), case.num_prompts * case.num_tokens / median, "tokens/s")
    yield Figure("prefill", str(case), num_flops / median / 1e12, "TFLOP/s", share, "the bf16 rate")


def submit_prompts(rig: Rig, case: PromptCase, seed: int) -> None:
    """Submit random prompts, of which each is to have one token."""
    for n, prompt in enumerate(_random_tokens(rig, case.num_prompts, case.num_tokens, seed)):
        rig.engine.submit(f"p/{n}", _request(prompt, 1), [])


def serve(rig: Rig, case: ServingCase, limits: Roofline) -> Iterator[Figure]:
    """All come at once; the engine looks a step ahead where it may."""
    engine = rig.engine
    for n, prompt in enumerate(_random_tokens(rig, case.num_requests, case.num_prompt, seed=7)):
        engine.submit(f"s/{n}", _request(prompt, case.num_new), [])
    num_preempted, num_tokens, num_steps = engine.scheduler.num_preemptions, 0, 0
    began = time.perf_counter()
    while engine.scheduler.has_work or engine.steps:
        num_tokens += len(engine.step().tokens)
        num_steps += 1
    seconds = time.perf_counter() - began
    assert num_tokens == case.num_requests * case.num_new
    least_s = _least_s(rig, case, limits)
    what = "what weights, KV and products allow"
    yield Figure("serving", str(case), num_tokens / seconds, "output tokens/s", least_s / seconds, what)
    num_all = num_tokens + case.num_requests * case.num_prompt
    yield Figure("serving", str(case), num_all / seconds, "tokens/s, prompts too")
    yield Figure("serving", str(case), 1e3 * seconds / num_steps, f"ms a step, of {num_steps}")
    yield Figure("serving", str(case), engine.scheduler.num_preemptions - num_preempted, "preemptions")


def memory(rig: Rig) -> Iterator[Figure]:
    where = rig.device.torch_device
    yield Figure("memory", "weights", rig.num_weight_bytes / 2**30, "GiB")
    yield Figure("memory", "KV cache", rig.num_kv_bytes / 2**30, "GiB")
    if where.type == "cuda":
        free, whole = torch.cuda.mem_get_info(where)
        used = whole - free - rig.num_weight_bytes - rig.num_kv_bytes
        yield Figure("memory", "all else: buffers, graphs, activations", used / 2**30, "GiB", used / whole, "the GPU's")


def _least_s(rig: Rig, case: ServingCase, limits: Roofline) -> float:
    """Prompts at the bf16 rate; each step's weights, and each token's KV, read at copy bandwidth."""
    cost = cost_of(rig)
    num_steps = -(-case.num_requests // rig.settings.max_running) * (case.num_new - 1)
    num_weight_bytes = num_steps * cost.decode_bytes(0, 0)
    mean_context = case.num_prompt + case.num_new // 2
    kv_bytes = cost.decode_bytes(1, mean_context) - cost.decode_bytes(0, 0)
    num_kv_bytes = case.num_requests * (case.num_new - 1) * kv_bytes
    prefill_s = case.num_requests * cost.prefill_flops(case.num_prompt) / limits.flops
    return prefill_s + (num_weight_bytes + num_kv_bytes) / limits.read_bytes_s


def fits(rig: Rig, num_sequences: int, num_tokens: int) -> bool:
    """Return whether so many sequences of so many tokens run at a time."""
    num_blocks = num_sequences * (rig.runner.layout.num_blocks_for(num_tokens) + 1)
    is_short = num_tokens <= rig.settings.max_context_tokens and num_sequences <= rig.settings.max_running
    return is_short and num_blocks + rig.engine.manager.num_blocks // 8 <= rig.engine.manager.num_free


def arrive(rig: Rig, case: DecodeCase, num_new: int, *, is_known: bool = False) -> list[str]:
    """Sequences of `case.context` tokens whose KV is here; they run. is_known: an answer is one token, again and again,
    whatever the logits are."""
    engine, keys = rig.engine, list[str]()
    for n, prompt in enumerate(_random_tokens(rig, case.batch, case.context, seed=3)):
        keys.append(f"d/{n}")
        request = _request(prompt, num_new, {n: 100.0} if is_known else {}, seed=n)
        engine.submit(keys[-1], request, [], importing=True)
        granted: list[Reservation | DiptychError] = []
        engine.incoming.reserve(keys[-1], case.context, granted.append)
        assert granted and isinstance(granted[0], Reservation), granted
        engine.commit(keys[-1], Seal(0, case.context, (prompt[0],)), PullTimes())
    return keys


def leave(engine: Engine, keys: list[str]) -> None:
    for key in keys:
        engine.abort(key)
    while engine.steps:
        engine.step()


def _random_tokens(rig: Rig, num: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(rig.spec.vocab_size, (num, length), generator=generator).tolist()


def _request(prompt: list[int], num_new: int, bias: Mapping[int, float] | None = None, seed: int = 0) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, logit_bias=bias or {}, seed=seed)
    return Request("benchmark", tuple(prompt), sampling, TIMEOUT_S)
