"""Maps between a head's draft vocabulary and its target's: d2t and t2d, read and checked.

A draft id d is the target's id d + d2t[d] (vLLM's `Eagle3LlamaForCausalLM.compute_logits`, SpecForge's `d2t`); t2d says
of each of the target's ids whether it is in the draft vocabulary.
"""

import torch
from torch import Tensor

from ...common.errors import CheckpointError
from ..head_specs.head_spec import HeadSpec
from .head_files import HeadFiles


class DraftVocabulary:
    """Vocabulary of a head, within its target's."""

    def __init__(self, size: int, to_target: Tensor | None) -> None:
        """size: of the target's. to_target: as `read_vocabulary_map` returns it."""
        self._size, self._to_target = size, to_target

    def logits(self, own: Tensor) -> Tensor:
        """own: [R, draft vocab] float32. Returns those of the target's tokens, [R, size] float32: -inf where the head
        has none; `own` itself where the vocabularies are the same."""
        if self._to_target is None:
            return own
        found = own.new_full((len(own), self._size), -torch.inf)
        found[:, self._to_target] = own
        return found


def read_vocabulary_map(files: HeadFiles, head: HeadSpec) -> Tensor | None:
    """Return the target's id of each draft id, [draft vocab] int64 on CPU; None: the vocabularies are the same. Raises
    CheckpointError."""
    draft, vocab = head.draft_vocab_size, head.decoder.vocab_size
    if not files.has("d2t"):
        if draft == vocab:
            return None
        raise CheckpointError(
            f"{files.folder}: tensor d2t is missing: the draft vocabulary has {draft} tokens and the target's {vocab}"
        )
    targets = torch.arange(draft) + files.integers("d2t", draft)
    outside = (targets < 0) | (targets >= vocab)
    if outside.any():
        first = int(outside.nonzero()[0])
        need = f"must lead to ids below the target's vocabulary of {vocab}"
        raise files.error("d2t", need, f"{int(targets[first])} for draft id {first}")
    if files.has("t2d"):
        _check_back(files, targets, vocab)
    return targets


def _check_back(files: HeadFiles, targets: Tensor, vocab: int) -> None:
    """Raise unless t2d has the ids that d2t leads to, and no others."""
    has = files.integers("t2d", vocab).bool()
    mapped = torch.zeros(vocab, dtype=torch.bool)
    mapped[targets] = True
    if int(mapped.sum()) < len(targets):
        raise files.error("d2t", "must lead to distinct ids", f"{int(mapped.sum())} of {len(targets)}")
    if not torch.equal(has, mapped):
        need = f"must name the {len(targets)} ids that d2t leads to"
        raise files.error("t2d", need, f"{int(has.sum())}, {int((has != mapped).sum())} of them others or missing")
