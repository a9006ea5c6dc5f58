"""Query-aware choice of blocks: bounds that hold, and attention over the chosen. (Triton: triton_cases/quest.py.)"""

import torch

from diptych.kernels.attention.decode_attention import decode_attention_twin
from diptych.kernels.attention.decode_plan import Decodes, plan_decode_twin
from diptych.kernels.attention.paged_attention import paged_attention
from diptych.kernels.attention.quest import score_blocks_twin, summarise_twin
from diptych.kernels.attention.quest_choice import choose_blocks, choose_tables_twin
from diptych.kernels.attention.sparse_attention import SparseRows, sparse_attention

from ...support.paged import make_batch, make_cache

LENGTHS, BLOCK_SIZE = [61, 9, 30], 5


def scored() -> tuple[torch.Tensor, torch.Tensor, Decodes, torch.Tensor]:
    """(q, cache, decodes, scores) of sequences with one new token each."""
    batch = make_batch(LENGTHS, [1, 1, 1], BLOCK_SIZE, 40)
    cache = make_cache(batch, 40, 2, 16, torch.float32)
    num_blocks = -(-batch.context_lens // BLOCK_SIZE)
    summaries = torch.full((40, 2, 2, 16), torch.nan)
    for table, length in zip(batch.block_tables, LENGTHS, strict=True):
        filled = (length - torch.arange(0, length, BLOCK_SIZE)).clamp(max=BLOCK_SIZE)
        summarise_twin(cache, summaries, table[: len(filled)].long(), filled)
    q = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(4))
    decodes = Decodes(batch.block_tables, batch.context_lens, batch.query_starts, 1)
    return q, cache, decodes, score_blocks_twin(q, summaries, batch.block_tables, num_blocks)


def attended(q: torch.Tensor, cache: torch.Tensor, decodes: Decodes) -> torch.Tensor:
    return decode_attention_twin(q, cache, decodes, plan_decode_twin(decodes, 4, 7, 8))


def test_a_score_is_never_less_than_a_products_with_a_key_of_the_block() -> None:
    q, cache, decodes, scores = scored()
    for s, length in enumerate(LENGTHS):
        for place in range(length):
            keys = cache[decodes.block_tables[s, place // BLOCK_SIZE], 0, place % BLOCK_SIZE]
            products = (q[s].view(2, 2, 16) * keys[:, None]).sum(-1).amax(1)
            assert (scores[s, :, place // BLOCK_SIZE] >= products - 1e-5).all()
        assert (scores[s, :, -(-length // BLOCK_SIZE) :] == -torch.inf).all()


def test_a_choice_of_all_blocks_is_the_whole_attention() -> None:
    q, cache, decodes, scores = scored()
    chosen = choose_blocks(scores, decodes.block_tables, decodes.context_lens, 13, BLOCK_SIZE)
    assert torch.equal(chosen.context_lens, decodes.context_lens)
    torch.testing.assert_close(attended(q, cache, chosen), attended(q, cache, decodes))


def test_the_best_blocks_are_chosen_and_always_the_first_and_the_two_newest() -> None:
    q, cache, decodes, scores = scored()
    chosen = choose_blocks(scores, decodes.block_tables, decodes.context_lens, 5, BLOCK_SIZE)
    assert chosen.context_lens.tolist() == [21, 9, 25]
    for s, last in enumerate((12, 1, 5)):
        for head in range(2):
            table = decodes.block_tables[s].tolist()
            places = [table.index(block) for block in chosen.block_tables[s, head, : last + 1].tolist()]
            others = (scores[s, head, 1 : last - 1].topk(2).indices + 1).tolist() if last > 4 else []
            assert places == sorted({0, *others, last - 1, last})
    assert attended(q, cache, chosen).isfinite().all()


def test_of_equal_scores_the_earlier_blocks_are_chosen() -> None:
    scores = torch.tensor([[[9.0, 1, 2, 1, 2, 1, 1, 0, 0]]])
    tables = torch.arange(20, 29, dtype=torch.int32)[None]
    chosen = choose_tables_twin(scores, tables, torch.tensor([9], dtype=torch.int32), 7)
    assert chosen.tolist() == [[[20, 21, 22, 23, 24, 27, 28]]]


def test_a_layers_sparse_rows_beside_others() -> None:
    """Bounds of the newest blocks are brought up to date; a row that is not sparse becomes zeros."""
    q, cache, decodes, scores = scored()
    summaries = torch.full((40, 2, 2, 16), torch.nan)
    older = decodes.block_tables[0, :11].long()
    summarise_twin(cache, summaries, older, torch.full((11,), BLOCK_SIZE))
    context_lens = torch.tensor([61, 0, 0], dtype=torch.int32)
    found = sparse_attention(q, cache, summaries, SparseRows(decodes.block_tables, context_lens, 5, BLOCK_SIZE))
    chosen = choose_blocks(scores, decodes.block_tables, decodes.context_lens, 5, BLOCK_SIZE)
    torch.testing.assert_close(found[0], attended(q, cache, chosen)[0])
    assert not found[1:].any()
    batch = make_batch(LENGTHS, [1, 1, 1], BLOCK_SIZE, 40)
    whole = sparse_attention(q, cache, summaries, SparseRows(decodes.block_tables, context_lens, 13, BLOCK_SIZE))
    torch.testing.assert_close(whole[0], paged_attention(q, cache, batch)[0])
