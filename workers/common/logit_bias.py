"""The bias that a request adds to the logits of some tokens, as two arrays that are made once. No torch."""

from array import array
from collections.abc import Mapping


class LogitBias(dict[int, float]):
    """Token id -> bias; not to be changed. `token_ids` and `biases` are its columns, in the same order."""

    __slots__ = ("biases", "token_ids")

    def __init__(self, entries: Mapping[int, float]) -> None:
        super().__init__(entries)
        self.token_ids = array("q", self.keys())
        self.biases = array("f", self.values())
