"""Attention of cuDNN without cuDNN: torch's own operator and its schema, computed plainly on CPU tensors.

What ATen and cuDNN refuse is refused. Plans are kept as ATen keeps them: for the thread that calls, by sizes and
strides, and one that cannot be built leaves an empty place, which ends the process when the same call follows.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from diptych.kernels.attention.libraries import cudnn_calls, cudnn_prompts, prompt_library
from diptych.kernels.attention.libraries.cudnn_calls import CudnnConfig
from diptych.kernels.common.tuning import CHIPS
from diptych.kernels.mla import cudnn_latents
from diptych.workers.execution.common import library_choice
from diptych.workers.execution.common.timed_choice import Contest, Named, Timed, Work

OPERATOR = "_scaled_dot_product_cudnn_attention"
TINY = CudnnConfig(least_new=6, least_pairs=60, unit=8, most_piece=16, step=2)

Sides = tuple[int, ...]
Plan = tuple[Sides, Sides, Sides, Sides, Sides, Sides, bool, bool]  # sizes and strides, has_logs, is_causal


@dataclass
class FakeCudnn:
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    unlike_dims: tuple[int, int] = (192, 128)  # of keys and of values
    refuses: Callable[[Plan], bool] = lambda _: False
    built: list[Plan] = field(default_factory=list[Plan])  # by any thread
    num_calls: int = 0
    _plans: threading.local = field(default_factory=threading.local)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor | int | None, ...]:
        """query: [B, N, T, D]; key: [B, K, C, D]; value: [B, K, C, V]."""
        assert attn_bias is None and not dropout_p and not return_debug_mask and scale is not None
        self._check(query, key, value)
        self._find_plan(query, key, value, compute_log_sumexp, is_causal)
        self.num_calls += 1
        group = query.shape[1] // key.shape[1]
        keys, values = (of.float().repeat_interleave(group, 1) for of in (key, value))
        scores = query.float() @ keys.mT * scale
        if is_causal:
            seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril_()
            scores.masked_fill_(~seen, float("-inf"))
        out = (scores.softmax(3) @ values).to(query.dtype)  # a weight of 0 times NaN is NaN
        logs = scores.logsumexp(3, keepdim=True) if compute_log_sumexp else None
        seed = torch.zeros((), dtype=torch.int64)
        assert query.stride(1) < query.stride(2) or 1 in query.shape[1:3], "ATen lays results out as queries are"
        tokens_first = out.transpose(1, 2).contiguous().transpose(1, 2)
        return tokens_first, logs, None, None, query.shape[2], key.shape[2], seed, seed.clone(), None

    def _check(self, *tensors: Tensor) -> None:
        query, key, value = tensors
        for of in tensors:
            if of.dim() != 4:
                raise RuntimeError("Q tensor has unexpected number of dims, please report a bug to PyTorch.")
            if of.dtype not in self.dtypes or of.dtype != query.dtype:
                raise RuntimeError(f"cuDNN Frontend error: no tensors of {of.dtype}")
            if of.stride(3) != 1:
                raise RuntimeError("cuDNN Frontend error: the stride of the last dimension is not 1")
            if of.data_ptr() % 16:
                raise RuntimeError("CUDA error: misaligned address")
        dim, dim_v = query.shape[3], value.shape[3]
        if key.shape[3] != dim or dim % 8 or dim_v % 8 or not (dim == dim_v <= 256 or (dim, dim_v) == self.unlike_dims):
            raise RuntimeError("cuDNN Frontend error: Unsupported head dimensions")
        if key.shape[:3] != value.shape[:3] or query.shape[1] % key.shape[1] or query.shape[0] != key.shape[0]:
            raise RuntimeError("cuDNN Frontend error: sizes do not fit")

    def _find_plan(self, query: Tensor, key: Tensor, value: Tensor, has_logs: bool, is_causal: bool) -> None:
        shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
        plan = (*shapes, query.stride(), key.stride(), value.stride(), has_logs, is_causal)
        plans: dict[Plan, bool] = self._plans.__dict__
        assert plans.get(plan, True), "the process has ended: this plan could not be built before"
        if plan not in plans:
            self.built.append(plan)
            plans[plan] = False
            if self.refuses(plan):
                raise RuntimeError("cuDNN Frontend error: No valid execution plans built.")
            plans[plan] = True


@contextmanager
def registered(fake: FakeCudnn) -> Iterator[FakeCudnn]:
    """Make it the operator for CPU tensors."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(OPERATOR, fake, "CPU")
    try:
        yield fake
    finally:
        library._destroy()


@contextmanager
def chosen(fake: FakeCudnn, config: CudnnConfig, *, computes: bool = True) -> Iterator[FakeCudnn]:
    """Make it the library that workers choose, for sequences of these lengths. computes: results are compared."""

    def take_it(contest: Contest, own: Work, others: Sequence[tuple[Named, Work]], timed: Timed) -> Named:
        ((found, work),) = others
        due, result = timed(own)[1], timed(work)[1]
        if computes:
            torch.testing.assert_close(result, due, rtol=1e-4, atol=1e-4)
        return found

    with pytest.MonkeyPatch.context() as patch, registered(fake):
        place(patch)
        patch.setattr(prompt_library, "chip_of", lambda _: CHIPS["h200"])
        patch.setattr(cudnn_calls, "CudnnConfig", lambda: config)
        patch.setattr(library_choice, "fastest", take_it)
        yield fake


def place(patch: pytest.MonkeyPatch, *, chip: str = "h200", version: int = 92000) -> None:
    """Let the CPU be a GPU for which cuDNN is asked."""
    for module in (cudnn_calls, cudnn_prompts):
        patch.setattr(module, "chip_of", lambda _: CHIPS[chip])
    patch.setattr(torch.backends.cudnn, "version", lambda: version)


def take_float32(patch: pytest.MonkeyPatch) -> None:
    """Let the adapters take float32, so that results are compared to the last digits."""
    for module in (cudnn_prompts, cudnn_latents):
        patch.setattr(module, "DTYPES", (torch.float32,))
