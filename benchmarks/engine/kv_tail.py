"""KIVI's KV, kept step by step as a worker would: `python -m benchmarks.engine.kv_tail [--seed 0]`.

    a step's keys and values  ->  at full width, beside those of the block that it begins in
    a block of them is full   ->  by `channels 32` (kv_methods.py) into the pool
    its last two blocks       ->  the tail, at full width, in place of those of two blocks before

A token reads the pool of the blocks before its own, and its own block at full width. So what it reads depends on the
tokens and its position alone, and the following must give the logits of one step over all tokens (shipped model,
float64, so that no number is rounded to its neighbour because it was summed in another order):

    chunks     steps of any length
    drafts     steps that end in other tokens, which are rejected: they may have filled a block. That block is in the
               tail, and fills again
    restarts   no tail, and the pool up to the last full block: what is left of a sequence that is preempted, handed
               off, or begins from the prefix cache. The rest of that block is computed again

It checks the design in docs/quantization.md; no worker stores KV so. Printed: the largest difference of a logit.
"""

import argparse
import math
import random
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.accuracy import TINY
from benchmarks.engine.kv_accuracy import held_out
from benchmarks.engine.kv_methods import by_channel, in_16_steps

BLOCK = 32
NUM_TAILS = 2
NUM_TOKENS = 256
MAX_CHUNK = 70
MAX_DRAFT = BLOCK + 1  # tokens: the next step begins in one of the two blocks of the tail
NO_DRAFT = torch.empty(0, dtype=torch.int64)
SHARE = 0.3  # of steps that draft, and of steps that are followed by a restart


class LayerKV:
    """KV of one sequence in one layer. Tensors: [2, K, tokens, D] float64, keys and values."""

    def __init__(self) -> None:
        self.pool: dict[int, Tensor] = {}  # by position of the block in the table
        self.tail: dict[int, Tensor] = {}  # by position of the block, modulo NUM_TAILS

    def put(self, start: int, new: Tensor) -> tuple[Tensor, Tensor]:
        """Store KV of the tokens from `start` on. Returns what the pool has of all tokens, and all at full width from
        the first block on that the step is in; elsewhere, and where the pool has nothing, NaN."""
        first, offset = start // BLOCK, start % BLOCK
        begun = self.tail[first % NUM_TAILS][:, :, :offset] if offset else new[:, :, :0]
        own = torch.cat((begun, new), dim=2)
        blocks = list(enumerate(own.split(BLOCK, dim=2), first))
        for position, block in blocks:
            if block.shape[2] == BLOCK:
                keys, values = block.float()
                self.pool[position] = torch.stack((by_channel(keys[None], BLOCK)[0], in_16_steps(values, -1))).double()
        self.tail |= {position % NUM_TAILS: block for position, block in blocks[-NUM_TAILS:]}
        missing = torch.full_like(own[:, :, :1], torch.nan)
        wide = torch.cat((missing.expand(-1, -1, first * BLOCK, -1), own), dim=2)
        found = [self.pool.get(i, missing.expand(-1, -1, BLOCK, -1)) for i in range(blocks[-1][0] + 1)]
        return torch.cat(found, dim=2)[:, :, : wide.shape[2]], wide


class TailedAttention:
    """Attention function of transformers, of one sequence."""

    def __init__(self) -> None:
        self.start = 0  # position of the step's first token
        self.layers: dict[int, LayerKV] = {}

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **rest: Any
    ) -> tuple[Tensor, None]:
        """query: [1, N, T, D]; key, value: [1, K, T, D]: of new tokens. Returns [1, T, N, D]."""
        stored = self.layers.setdefault(module.layer_idx, LayerKV())
        kept, wide = stored.put(self.start, torch.stack((key[0], value[0])))
        group, end = query.shape[1] // key.shape[1], wide.shape[2]
        found: list[Tensor] = []
        for first in range(self.start // BLOCK * BLOCK, end, BLOCK):
            rows = torch.arange(max(first, self.start), min(first + BLOCK, end))
            read = torch.cat((kept[:, :, :first], wide[:, :, first : first + BLOCK]), dim=2)
            keys, values = read.repeat_interleave(group, 1)
            scores = query[0, :, rows - self.start] @ keys.mT * scaling
            later = torch.arange(read.shape[2]) > rows[:, None]
            found.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ values)
        return torch.cat(found, dim=1).transpose(0, 1)[None].contiguous(), None

    def restart(self) -> int:
        """Forget the tail, and what the pool has of blocks that are not full. Returns the position to go on from."""
        self.start = self.start // BLOCK * BLOCK
        for layer in self.layers.values():
            layer.tail.clear()
            layer.pool = {i: block for i, block in layer.pool.items() if i < self.start // BLOCK}
        return self.start


class SteppedSequence:
    def __init__(self, model: Any, attention: TailedAttention, tokens: Tensor) -> None:
        """tokens: [tokens] int64."""
        self._model, self._attention, self._tokens = model, attention, tokens
        attention.start, attention.layers = 0, {}

    def step(self, num_new: int, draft: Tensor) -> Tensor:
        """Compute so many tokens and a draft that is rejected. Returns the logits of the tokens, [num_new, vocab]."""
        start = self._attention.start
        some = torch.cat((self._tokens[start : start + num_new], draft))
        positions = torch.arange(start, start + len(some))
        found = self._model(some[None], position_ids=positions[None], use_cache=False).logits[0, :num_new]
        self._attention.start = start + num_new
        return found


def worst_of(sequence: SteppedSequence, attention: TailedAttention, whole: Tensor, kinds: set[str], seed: int) -> float:
    """Largest difference of a logit from `whole`, [tokens, vocab], that of one step; infinite where one is NaN."""
    draws, num_tokens, vocab_size = random.Random(seed), *whole.shape
    worst, start = 0.0, 0
    while start < num_tokens:
        num_new, draft = min(draws.randint(1, MAX_CHUNK), num_tokens - start), NO_DRAFT
        if "drafts" in kinds and draws.random() < SHARE:
            draft = torch.tensor([draws.randrange(vocab_size) for _ in range(MAX_DRAFT)])
        found = sequence.step(num_new, draft)
        gaps = (found - whole[start : start + num_new]).abs()
        worst = max(worst, gaps.nan_to_num(nan=math.inf).max().item())
        start += num_new
        if "restarts" in kinds and start < num_tokens and draws.random() < SHARE:
            start = attention.restart()
    return worst


def main() -> None:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    attention = TailedAttention()
    ALL_ATTENTION_FUNCTIONS.register("tailed", attention)
    model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64, attn_implementation="tailed").eval()
    tokens = torch.tensor(held_out(1)[0][:NUM_TOKENS])
    with torch.inference_mode():
        whole = SteppedSequence(model, attention, tokens).step(NUM_TOKENS, NO_DRAFT)
        for kinds in (set[str](), {"drafts"}, {"restarts"}, {"drafts", "restarts"}):
            name = ", ".join(["chunks", *sorted(kinds)])
            sequence = SteppedSequence(model, attention, tokens)
            print(f"{name:26} {worst_of(sequence, attention, whole, kinds, args.seed):.1e}", flush=True)


if __name__ == "__main__":
    main()
