"""Methods of speculation by their names: makes the drafter that a worker's settings ask for."""

from collections.abc import Callable

from ..common.errors import ConfigError
from ..core.draft import ModelProposer, Proposer
from ..core.drafting import Drafter
from .model_speculator import ModelSpeculator
from .ngram import NgramProposer
from .speculator import Speculator
from .suffix import SuffixProposer

PROPOSERS: dict[str, Callable[[], Proposer]] = {"ngram": NgramProposer, "suffix": SuffixProposer}


def make_speculator(
    method: str, max_tokens: int, min_accept: float = 0.0, model: ModelProposer | None = None
) -> Drafter:
    """Make the drafter of some settings. model: what drafts, of methods that have a model. Raises ConfigError for a
    method that there is not."""
    if model is not None:
        return ModelSpeculator(method, model, max_tokens, min_accept)
    if method not in PROPOSERS:
        raise ConfigError(f"there is no method {method!r} of speculation: choose one of {', '.join(PROPOSERS)}")
    return Speculator(method, PROPOSERS[method](), max_tokens, min_accept)
