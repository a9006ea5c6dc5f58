"""Which part of a decoder each rank of a worker holds. Arithmetic only, no torch.

Query heads, KV heads and the MLP's inner dimension are divided evenly, in order; where there are more ranks than KV
heads, neighbouring ranks hold the same one (kv_layout.py says which). Norms are everybody's.
"""

from dataclasses import dataclass, replace

from ..errors import ConfigError
from .spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Share:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def part_of(self, length: int) -> slice:
        """Its part of an axis that is divided over the ranks."""
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)


WHOLE = Share()


def check_divides(spec: ModelSpec, size: int) -> None:
    """Raise ConfigError unless `size` ranks can share a decoder of `spec`."""

    def refuse(what: str) -> ConfigError:
        fitting = [n for n in range(1, spec.num_heads + 1) if _divides(spec, n)]
        return ConfigError(
            f"tensor_parallel={size} does not divide the model's {what}: use one of {', '.join(map(str, fitting))}"
        )

    if spec.num_heads % size:
        raise refuse(f"{spec.num_heads} attention heads")
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        raise refuse(f"{spec.num_kv_heads} key-value heads, nor they it")
    if spec.intermediate_size % size:
        raise refuse(f"intermediate size of {spec.intermediate_size}")


def _divides(spec: ModelSpec, size: int) -> bool:
    heads_fit = spec.num_kv_heads % size == 0 or size % spec.num_kv_heads == 0
    return spec.num_heads % size == 0 and heads_fit and spec.intermediate_size % size == 0


def spec_of(spec: ModelSpec, share: Share) -> ModelSpec:
    """The spec of the layers that `share` holds: its heads, its part of the MLP."""
    return replace(
        spec,
        num_heads=spec.num_heads // share.size,
        num_kv_heads=max(spec.num_kv_heads // share.size, 1),
        intermediate_size=spec.intermediate_size // share.size,
    )


def part_of_tensor(spec: ModelSpec, name: str, share: Share) -> tuple[slice, ...]:
    """What `share` holds of the checkpoint's tensor `name`, as an index. spec: of the whole model."""
    match name.split(".")[-2]:
        case "q_proj":
            return (share.part_of(spec.num_heads * spec.head_dim),)
        case "k_proj" | "v_proj":
            first = share.rank * spec.num_kv_heads // share.size
            num = max(spec.num_kv_heads // share.size, 1)
            return (slice(first * spec.head_dim, (first + num) * spec.head_dim),)
        case "gate_proj" | "up_proj":
            return (share.part_of(spec.intermediate_size),)
        case "o_proj" if name.endswith("weight"):
            return slice(None), share.part_of(spec.num_heads * spec.head_dim)
        case "down_proj" if name.endswith("weight"):
            return slice(None), share.part_of(spec.intermediate_size)
        case _:
            return (slice(None),)
