"""QUEST beside attention to everything: 2,048 tokens of each context are read, after the summaries of all blocks.

Bytes: two summaries a block and KV head, K and V of the blocks that are chosen, the queries and the outputs.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from diptych.kernels.attention.decode_attention import decode_attention_triton, decode_attention_twin
from diptych.kernels.attention.decode_plan import DecodePlan, Decodes, decode_config, plan_decode
from diptych.kernels.attention.quest import score_blocks_triton, score_blocks_twin, summarise_triton, summarise_twin
from diptych.kernels.attention.quest_choice import choose_blocks
from diptych.kernels.common.tuning import chip_of

from .common import DEVICE, HALF, Case, Random, sized
from .decode_attention import BLOCK_SIZE, DIM, HEADS, KV_HEADS, Inputs
from .decode_attention import make as make_decode
from .decode_attention import run as attend_to_all

NUM_CHOSEN = sized(128, 4)  # blocks


class QuestInputs:
    def __init__(self, seed: int, num_seqs: int, context: int) -> None:
        self.all: Inputs = make_decode(seed, num_seqs, context)
        keys = self.all.cache[:, 0]
        self.summaries: Tensor = torch.stack((keys.amin(1), keys.amax(1)), dim=1)
        self.num_blocks = torch.full((num_seqs,), context // BLOCK_SIZE, dtype=torch.int32, device=DEVICE)
        # Where the chosen part is cut depends on its length alone: planned once a step for all layers.
        chosen = self.chosen(self.scores(score_blocks_twin))
        self.plan: DecodePlan = plan_decode(chosen, KV_HEADS, decode_config(chip_of(DEVICE), self.all.cache))

    def scores(self, score_blocks: Callable[..., Tensor]) -> Tensor:
        return score_blocks(self.all.q, self.summaries, self.all.decodes.block_tables, self.num_blocks)

    def chosen(self, scores: Tensor) -> Decodes:
        tables, lengths = self.all.decodes.block_tables, self.all.decodes.context_lens
        return choose_blocks(scores, tables, lengths, NUM_CHOSEN, BLOCK_SIZE)


def run(x: QuestInputs) -> tuple[Tensor, Tensor]:
    """(scores of the blocks, attention over the best)."""
    scores = x.scores(score_blocks_triton)
    return scores, decode_attention_triton(x.all.q, x.all.cache, x.chosen(scores), x.plan)


def reference(x: QuestInputs, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Scores by the twin; attention over the blocks that the scores found do choose, for theirs may be rounded so that
    others win."""
    return x.scores(score_blocks_twin), decode_attention_twin(x.all.q, x.all.cache, x.chosen(found[0]), x.plan)


def case(num_seqs: int, context: int) -> Case:
    blocks = num_seqs * context // BLOCK_SIZE
    chosen = num_seqs * min(NUM_CHOSEN * BLOCK_SIZE, context)
    vector = KV_HEADS * DIM * HALF.itemsize
    return Case(
        "QUEST: score, choose, attend",
        f"{num_seqs} x {context}, {NUM_CHOSEN} blocks of {BLOCK_SIZE}",
        lambda seed: QuestInputs(seed, num_seqs, context),
        run,
        reference,
        2 * blocks * vector + 2 * chosen * vector + 2 * num_seqs * HEADS * DIM * HALF.itemsize,
        4.0 * (blocks + chosen) * HEADS * DIM,
        peers={"attention to all": lambda x: attend_to_all(x.all)},
        unlike=("attention to all",),
    )


def summarise_case(num_blocks: int) -> Case:
    """All blocks anew; a step has to do so for those that it has written to."""

    def make(seed: int) -> tuple[Tensor, ...]:
        random = Random(seed)
        cache = random.normal(num_blocks, 2, BLOCK_SIZE, KV_HEADS, DIM)
        lengths = random.whole(1, BLOCK_SIZE + 1, num_blocks, dtype=torch.int32)
        return cache, torch.zeros_like(cache[:, :, 0]), random.order(num_blocks), lengths

    def by(summarise: Callable[..., None], x: tuple[Tensor, ...]) -> Tensor:
        summarise(*x)
        return x[1]

    # Read: the filled half of the keys on average; written: two vectors a block and head.
    num_bytes = num_blocks * KV_HEADS * DIM * HALF.itemsize * ((BLOCK_SIZE + 1) / 2 + 2)
    return Case(
        "QUEST: summarise",
        f"{num_blocks} blocks",
        make,
        lambda x: by(summarise_triton, x),
        lambda x, _: by(summarise_twin, x),
        num_bytes,
        peers={"torch": lambda x: by(summarise_twin, x)},
        tolerance=0.0,
    )


def cases() -> Iterator[Case]:
    yield case(*sized((8, 32768), (2, 48)))
    yield case(*sized((1, 131072), (1, 64)))
    yield summarise_case(sized(16384, 9))
