"""A DraftHead computed over a paged cache, one sequence in scattered blocks."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from diptych.workers.device.kv_cache import KVCache
from diptych.workers.models.heads.draft_head import DraftHead
from diptych.workers.models.layers.attention import StepMeta
from diptych.workers.models.layers.rope import rope_tables
from diptych.workers.models.layers.step import Step
from diptych.workers.models.plan.kv_plan import layout_of

CPU, BLOCK_SIZE = torch.device("cpu"), 16
TABLE = (3, 0, 5, 1, 11, 4, 10, 2, 9, 7)  # blocks of the sequence


class PagedHead:
    """Entries of one sequence, in a pool with `num_layers_before` layers of the same shape before the head's."""

    def __init__(self, head: DraftHead, num_layers_before: int = 0) -> None:
        self.head, self.num_entries = head, 0
        layout = layout_of(head.spec.decoder, "float32", BLOCK_SIZE)
        layout = replace(layout, num_layers=layout.num_layers + num_layers_before)
        self.cache = KVCache(layout, max(TABLE) + 1, CPU)
        self.cache.tensor.fill_(torch.nan)  # nothing may depend on what blocks held before
        self.tables = rope_tables(head.spec.decoder, len(TABLE) * BLOCK_SIZE, CPU)

    def forward(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Compute the entries after those so far."""
        meta = self.meta(len(token_ids))
        self.num_entries += len(token_ids)
        with torch.inference_mode():
            return self.head.forward(token_ids, hidden, self.cache, meta)

    def meta(self, num_new: int) -> StepMeta:
        lens = (np.array([n], dtype=np.int32) for n in (num_new, self.num_entries + num_new))
        none = np.empty(0, dtype=np.int32)
        words = np.zeros(num_new, dtype=np.int32)
        step = Step(*lens, np.array([TABLE], dtype=np.int32), words, none)
        return step.meta(self.tables, BLOCK_SIZE)
