"""A step's sequences over the paged KV cache, as the attention kernels take them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from .attention_tiles import LOG2_E
from .decode_plan import DecodePlan, Decodes


def sent(numbers: Any, device: torch.device) -> Tensor:
    """Whole numbers as int32 on the device. Pinned on their way: else the copy would wait for the device."""
    host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class PromptLibrary(Protocol):
    """A library or kernel that attends for prompts over the paged cache: those of libraries/, and hopper_prompts.py."""

    @property
    def name(self) -> str: ...

    def takes(self, q: Tensor, cache: Tensor, options: AttentionOptions, scales: Tensor | None) -> bool:
        """Return whether it knows such inputs, which are paged_attention's."""
        ...

    def attend(
        self, q: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions, out: Tensor, first_seq: int
    ) -> None:
        """Compute what prefill_attention_triton does, for the sequences from `first_seq` on, into their rows of
        `out`."""
        ...


class LatentPromptLibrary(Protocol):
    """A library that attends for prompts over expanded latents: libraries/prompt_library.py, mla/cudnn_latents.py."""

    @property
    def name(self) -> str: ...

    def takes_latent(self, q: Tensor, values: Tensor) -> bool:
        """Return whether it knows such inputs, which are mla_prefill's."""
        ...

    def attend_latent(
        self, q: Tensor, keys: Tensor, rope_keys: Tensor, values: Tensor, chunks: LatentChunks, scale: float
    ) -> Tensor:
        """Compute what mla_prefill does."""
        ...


class LatentChunks(Protocol):
    """Prompt chunks over latent KV; mla/prefill.py's Chunks."""

    @property
    def num_new(self) -> Sequence[int]: ...

    @property
    def context_lens(self) -> Sequence[int]: ...

    def starts(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows of the queries and of the keys at which each sequence begins, [S + 1] int32 both."""
        ...


class LatentLibrary(Protocol):
    """A library or kernel that attends over latents for decodes; mla/latent_library.py and hopper_latents.py have one
    each."""

    @property
    def name(self) -> str: ...

    def takes(self, q_latent: Tensor, q_rope: Tensor, cache: Tensor, decodes: Decodes) -> bool:
        """Return whether it knows such inputs, which are mla_decode_triton's."""
        ...

    def attend(
        self, q_latent: Tensor, q_rope: Tensor, cache: Tensor, decodes: Decodes, plan: DecodePlan, scale: float
    ) -> Tensor:
        """Compute what mla_decode_triton does."""
        ...


@dataclass(frozen=True)
class PagedBatch:
    """Places of a step's tokens. S sequences; those with one new token come first.

    A sequence's `num_new` tokens are the last of its `context_lens` ones; their KV is already in the cache. Of a
    captured graph, which serves contexts of any length, the host knows none: `host_context_lens` is empty. All decode
    then, up to `max_queries` tokens each, of which the device alone knows how many; there are as many sequences as
    query rows, some perhaps without one. A sequence of no context is idle, and its row becomes zeros.
    """

    block_tables: Tensor  # [S, max_blocks] int32, padded with any valid block
    context_lens: Tensor  # [S] int32
    query_starts: Tensor  # [S + 1] int32: sequence s owns query rows query_starts[s] to query_starts[s + 1]
    host_context_lens: list[int]
    host_num_new: list[int]
    num_decodes: int
    block_size: int
    max_queries: int = 1  # new tokens of a sequence that decodes, at most
    library: PromptLibrary | None = None  # that attends for prompts, in what it takes
    latent_library: LatentPromptLibrary | None = None  # the same, over expanded latents
    latents: LatentLibrary | None = None  # that attends over latents for decodes, in what it takes
    plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # what kernels keep for all layers

    def looked_up(self) -> PagedBatch:
        """Return the batch with the contexts read from the device, as its twin needs them in a captured graph: each
        query row as a sequence that ends with it."""
        starts = self.query_starts
        row = torch.arange(len(self.context_lens), device=starts.device)
        owner = torch.repeat_interleave(row, starts.diff())
        later = starts[owner + 1] - 1 - row.int()  # queries of its sequence
        contexts = self.context_lens[owner] - later
        return replace(
            self,
            block_tables=self.block_tables[owner],
            context_lens=contexts,
            host_context_lens=[max(n, 1) for n in contexts.tolist()],
            max_queries=1,
            plans={},
        )

    def decodes(self, which: Tensor) -> PagedBatch:
        """Return the batch of these sequences alone, which all decode one token. which: [n] int64."""
        contexts = self.context_lens[which]
        return replace(
            self,
            block_tables=self.block_tables[which],
            context_lens=contexts,
            host_context_lens=contexts.tolist(),
            host_num_new=[1] * len(which),
            num_decodes=len(which),
            plans={},
        )

    @cached_property
    def decode_blocks(self) -> Tensor:
        """[num_decodes * padded blocks] int64: what the twin gathers for its decodes."""
        longest = max(self.host_context_lens[: self.num_decodes])
        return self.block_tables[: self.num_decodes, : -(-longest // self.block_size)].reshape(-1).long()

    @cached_property
    def decode_padding(self) -> tuple[Tensor, Tensor]:
        """(bias [num_decodes, 1, 1, L] float32 of 0 and -inf, rows of the gathered KV beyond the contexts, int64)."""
        num_slots = self.decode_blocks.numel() // self.num_decodes * self.block_size
        beyond = torch.arange(num_slots, device=self.context_lens.device) >= self.context_lens[: self.num_decodes, None]
        bias = torch.zeros(beyond.shape, device=beyond.device).masked_fill_(beyond, float("-inf"))
        return bias[:, None, None, :], beyond.view(-1).nonzero().view(-1)


@dataclass(frozen=True)
class AttentionOptions:
    scale: float | None = None  # of the scores; None: 1 / sqrt(D)
    softcap: float = 0.0  # 0: none; else scores become softcap * tanh(score / softcap) (Gemma 2, section 2)
    window: int = 0  # 0: all; otherwise a token attends to this many tokens, including itself (Mistral 7B, section 2)
    sinks: Tensor | None = None  # [N] float32: a score of each head that takes weight and gives no value (gpt-oss)

    @property
    def are_default(self) -> bool:
        return self.scale is None and not self.softcap and not self.window and self.sinks is None

    def scale_of(self, dim: int) -> float:
        return 1.0 / math.sqrt(dim) if self.scale is None else self.scale

    def numbers(self, dim: int) -> tuple[float, float, int]:
        """scale, softcap and window as kernels take them: scores are to base 2 where nothing caps them before."""
        scale = self.scale_of(dim)
        assert scale > 0
        return scale if self.softcap else scale * LOG2_E, self.softcap, self.window

    def flags(self, scales: Tensor | None) -> dict[str, bool]:
        """Constants of a kernel: what it need not look at. scales: of 8-bit KV."""
        return {
            "HAS_WINDOW": self.window > 0,
            "HAS_SOFTCAP": self.softcap > 0,
            "HAS_SCALES": scales is not None,
            "HAS_SINKS": self.sinks is not None,
        }

    def check_heads(self, num_heads: int) -> None:
        assert self.sinks is None or (self.sinks.is_contiguous() and self.sinks.numel() == num_heads)


NO_OPTIONS = AttentionOptions()
