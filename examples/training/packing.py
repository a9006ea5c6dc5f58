"""Documents to rows of token ids: each row starts with a document, and is filled with the next ones."""

import random
from collections.abc import Iterator

import torch
from transformers import PreTrainedTokenizerFast

from .documents import Chat, Document, Documents
from .vocabulary import BOS, END_OF_TEXT, SPECIAL_TOKENS

IGNORED = -100  # what cross_entropy leaves out
ASSISTANT_ID = SPECIAL_TOKENS.index("<|assistant|>")
ASKING_IDS = (SPECIAL_TOKENS.index("<|system|>"), SPECIAL_TOKENS.index("<|user|>"))
BARE_TEXT_SHARE = 0.15  # of the texts, those without BOS, as a client may send them


def render(document: Document, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> str:
    """The document with its special tokens."""
    if isinstance(document, Chat):
        rendered = tokenizer.apply_chat_template(list(document.messages), tokenize=False)
        assert isinstance(rendered, str)
        return rendered
    return ("" if rng.random() < BARE_TEXT_SHARE else BOS) + document.text + END_OF_TEXT


class Packer:
    """Draws batches of rows from an endless stream of documents."""

    def __init__(self, documents: Documents, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._short = documents.stream(seed)
        self._long = documents.stream(seed + 1, long=True)

    def batch(self, num_rows: int, num_tokens: int, *, long: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and labels, int64[num_rows, num_tokens]; the last document of a row is cut where the row ends."""
        stream = self._long if long else self._short
        rows = [self._row(stream, num_tokens) for _ in range(num_rows)]
        ids, labels = zip(*rows, strict=True)
        return torch.tensor(ids), torch.tensor(labels)

    def _row(self, stream: Iterator[Document], num_tokens: int) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < num_tokens:
            text = render(next(stream), self._tokenizer, self._rng)
            new_ids = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
            ids += new_ids
            labels += label(new_ids)
        return ids[:num_tokens], labels[:num_tokens]


def label(ids: list[int]) -> list[int]:
    """The ids, but IGNORED where a system or user speaks: a model need not learn to ask."""
    labels: list[int] = []
    learned = True
    for token_id in ids:
        if token_id in ASKING_IDS:
            learned = False
        labels.append(token_id if learned else IGNORED)
        if token_id == ASSISTANT_ID:
            learned = True
    return labels
