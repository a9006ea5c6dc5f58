"""Checks whether a model may draft for another one (method `draft`), from their folders alone. No torch."""

import json
from pathlib import Path
from typing import Any, cast

from ...common.errors import ConfigError
from ..families.spec import ModelSpec
from .formats import check_shares
from .sharding import check_divides


def check_draft_fits(
    draft_path: Path, draft: ModelSpec, path: Path, target: ModelSpec, max_context_tokens: int
) -> None:
    """Raise ConfigError, which names both models, unless the draft has the target's tokens, KV of the same kind, and
    positions for `max_context_tokens`."""
    _check_vocabularies(draft_path, draft, path, target)
    check_kv_fits(draft_path, draft, path, target, max_context_tokens)


def check_draft_divides(draft_path: Path, draft: ModelSpec, quantize: str | None, num_ranks: int) -> None:
    """Raise ConfigError, which names the draft and the sizes, unless so many ranks can share it, in that format."""
    try:
        check_divides(draft, num_ranks)
        check_shares(draft, quantize, num_ranks)
    except ConfigError as e:
        remedy = "or set draft_tensor_parallel to 1, with which the first rank computes the draft alone"
        raise ConfigError(f"the draft {draft_path} cannot be shared by {num_ranks} ranks: {e.message}; {remedy}") from e


def check_kv_fits(draft_path: Path, draft: ModelSpec, path: Path, target: ModelSpec, max_context_tokens: int) -> None:
    """Raise ConfigError, which names both models, unless the draft, or the layers of a head, have KV that can be beside
    the target's, and positions for `max_context_tokens`."""
    if draft.kv.num_vectors < target.kv.num_vectors:
        raise ConfigError(
            f"the draft {draft_path} has latent attention, and {path} has none: use a draft with keys and values"
        )
    if draft.longest_context < max_context_tokens:
        raise ConfigError(
            f"the draft {draft_path} has {draft.longest_context} positions, fewer than max_context_tokens="
            f"{max_context_tokens} of {path}: lower max_context_tokens, or use another draft"
        )


def _check_vocabularies(draft_path: Path, draft: ModelSpec, path: Path, target: ModelSpec) -> None:
    """Raise ConfigError unless both models have the same tokens."""
    remedy = "a draft needs the vocabulary of the model that is served"
    if draft.vocab_size != target.vocab_size:
        sizes = f"{draft.vocab_size:,} tokens, and {path} {target.vocab_size:,}"
        raise ConfigError(f"the draft {draft_path} has a vocabulary of {sizes}: {remedy}")
    own, other = _tokens(draft_path), _tokens(path)
    if own is not None and other is not None and own != other:
        token = min(token for token, _ in own.items() ^ other.items())
        ids = f"the token {token!r} has the id {own.get(token)} there and {other.get(token)} here"
        raise ConfigError(f"the draft {draft_path} has another vocabulary than {path}: {ids}; {remedy}")


def _tokens(path: Path) -> dict[str, int] | None:
    """Tokens of a folder's tokenizer.json, with their ids; None: it has no such file, or one of another kind."""
    try:
        with (path / "tokenizer.json").open(encoding="utf-8") as file:
            found: Any = json.load(file)["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return cast(dict[str, int], found) if isinstance(found, dict) else None
