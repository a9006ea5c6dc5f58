"""Layers of a model that attend sparsely where the settings ask for it. No torch."""

from ..families.spec import AttentionSpec, ModelSpec

NUM_FULL = 2  # leading layers, in which attention is spread over the context (QUEST, section 3.1)


def sparse_layers(spec: ModelSpec, budget: int) -> dict[int, int]:
    """Return, for each layer of the model that does, its layer of the KV cache. budget: tokens, 0: none does.

    Latent attention stays full; so do layers with a window, which bounds what they read already, and layers that read
    another one's KV.
    """
    if not budget:
        return {}
    found = [(i, of.attention, kv) for i, (of, kv) in enumerate(zip(spec.layers, spec.kv_ids, strict=True))]
    return {
        i: kv
        for i, of, kv in found[NUM_FULL:]
        if isinstance(of, AttentionSpec) and not of.window and of.kv_from is None
    }


def why_of(spec: ModelSpec, budget: int) -> str:
    """Line for the log."""
    num = len(sparse_layers(spec, budget))
    return f"{num} of {spec.num_layers} layers decode from {budget} tokens of a longer context, the others from all"
