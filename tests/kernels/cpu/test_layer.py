"""The compiled layers as families differ in them, against the same written out plainly in torch."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from diptych.kernels.attention.paged_batch import AttentionOptions
from diptych.kernels.cpu.layer import AttentionKind, CompiledLayers, DecoderShape, PackedLayer, PackedOuter, StepMemory
from diptych.kernels.cpu.library import Library, Team
from diptych.kernels.cpu.linear import Epilogue, pack

H, INNER, N, K, D, VOCAB, EPS, BLOCK_SIZE = 48, 80, 4, 2, 16, 70, 1e-5, 16
NORMS = ("input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
GATES: dict[Epilogue, Callable[[Tensor], Tensor]] = {
    Epilogue.SILU_MUL: functional.silu,
    Epilogue.GELU_MUL: lambda x: functional.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class Family:
    """What its layers are, and two layers of attention in turn."""

    norms: tuple[str, ...] = ("input_norm", "mlp_norm")
    kinds: tuple[AttentionOptions, ...] = (AttentionOptions(),)
    rotated: tuple[int, ...] = (D,)  # by kind
    qk_norm: int = 0  # numbers that one norm of queries is of
    has_sinks: bool = False
    has_bias: bool = False
    gate: Epilogue = Epilogue.SILU_MUL
    embed_scale: float = 1.0
    logit_softcap: float = 0.0


FAMILIES = {
    "llama": Family(),
    "mistral": Family(kinds=(AttentionOptions(window=19),)),
    "gemma2": Family(
        NORMS,
        (AttentionOptions(0.3, 5.0, 17), AttentionOptions(0.3, 5.0)),
        (D, D),
        gate=Epilogue.GELU_MUL,
        embed_scale=7.0,
        logit_softcap=3.0,
    ),
    # A cap that makes equals of most of the likeliest: the lowest of them is picked, as of the logits.
    "saturated": Family(logit_softcap=0.02),
    "gemma3": Family(
        NORMS, (AttentionOptions(0.2, window=9), AttentionOptions(0.2)), (D, 6), D, gate=Epilogue.GELU_MUL
    ),
    "olmo2": Family(("attention_out_norm", "mlp_out_norm"), qk_norm=N * D),
    "gpt_oss": Family(
        kinds=(AttentionOptions(window=16), AttentionOptions()), rotated=(D, D), has_sinks=True, has_bias=True
    ),
    "no_rotation": Family(kinds=(AttentionOptions(), AttentionOptions(window=30)), rotated=(0, 8)),
}


@dataclass
class Weights:
    """Float32 values, rounded like the packed weights."""

    dtype: torch.dtype
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(5))

    def of(self, *shape: int, around: float = 0.0, size: float = 0.3) -> Tensor:
        return (around + size * torch.randn(shape, generator=self.generator)).to(self.dtype).float()

    def layer(self, family: Family) -> dict[str, Tensor]:
        shapes = {"qkv": ((N + 2 * K) * D, H), "o": (H, N * D), "gate_up": (2 * INNER, H), "down": (H, INNER)}
        made = {name: self.of(*shape) for name, shape in shapes.items()}
        made |= {name: self.of(H, around=1.0) for name in family.norms}
        if family.has_bias:
            made |= {f"{name}_bias": self.of(shape[0]) for name, shape in shapes.items()}
        if family.qk_norm:
            made["q_norm"] = self.of(family.qk_norm, around=1.0)
            made["k_norm"] = self.of(family.qk_norm if family.qk_norm == D else K * D, around=1.0)
        if family.has_sinks:
            made["sinks"] = self.of(N, size=1.0)
        return made


def rope_of(num_rotated: int, base: float) -> Tensor:
    frequencies = base ** -torch.linspace(0, 1, num_rotated // 2)
    angles = torch.arange(64.0)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


@dataclass
class Model:
    """A family's decoder, three layers of it."""

    family: Family
    weights: Weights

    def __post_init__(self) -> None:
        self.layers = [self.weights.layer(self.family) for _ in range(3)]
        self.norm, self.embed = self.weights.of(H, around=1.0), self.weights.of(VOCAB, H)
        self.ropes = [rope_of(num, 20.0 + i) for i, num in enumerate(self.family.rotated)]

    def logits(self, token_ids: Tensor) -> Tensor:
        """Hidden states of every token of one sequence, computed with torch. token_ids: [T]."""
        family = self.family
        x = self.embed[token_ids] * family.embed_scale
        for i, layer in enumerate(self.layers):
            kind = i % len(family.kinds)
            for half, before, after in (("attention", *NORMS[:2]), ("mlp", *NORMS[2:])):
                read = rms(x, layer[before]) if before in layer else x
                added = self.attend(layer, read, kind) if half == "attention" else self.mlp(layer, read)
                x = x + (rms(added, layer[after]) if after in layer else added)
        logits, cap = rms(x, self.norm) @ self.embed.T, family.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def attend(self, layer: dict[str, Tensor], x: Tensor, kind: int) -> Tensor:
        length, options = len(x), self.family.kinds[kind]
        q, k, v = product(layer, "qkv", x).split((N * D, K * D, K * D), dim=1)
        if "q_norm" in layer:
            q, k = (rms(t.reshape(length, -1, len(w)), w) for t, w in ((q, layer["q_norm"]), (k, layer["k_norm"])))
        q, k = (rotated(t.reshape(length, -1, D), self.ropes[kind][:length]) for t in (q, k))
        k, v = (t.reshape(length, K, D).repeat_interleave(N // K, dim=1) for t in (k, v))
        scores = torch.einsum("qnd,knd->nqk", q, k) * options.scale_of(D)
        if options.softcap:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        places = torch.arange(length)
        age = places[:, None] - places
        scores = scores.masked_fill((age < 0) | (age >= (options.window or length)), -torch.inf)
        if "sinks" in layer:
            scores = torch.cat((scores, layer["sinks"][:, None, None].expand(N, length, 1)), dim=2)
        attended = torch.einsum("nqk,knd->qnd", scores.softmax(dim=2)[..., :length], v)
        return product(layer, "o", attended.reshape(length, -1))

    def mlp(self, layer: dict[str, Tensor], x: Tensor) -> Tensor:
        gate, up = product(layer, "gate_up", x).chunk(2, dim=1)
        return product(layer, "down", GATES[self.family.gate](gate) * up)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def product(layer: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return functional.linear(x, layer[name], layer.get(f"{name}_bias"))


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x: [T, heads, D]; cos_sin: [T, R]."""
    first, second, rest = x.split((half := cos_sin.shape[1] // 2, half, D - 2 * half), dim=2)
    cos, sin = cos_sin[:, None].chunk(2, dim=2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=2)


class Compiled:
    """The same by the kernels, over a cache of its own; sequence s has blocks 4 s to 4 s + 3. `between`: cores on which
    the team computes from the middle of a step on."""

    between: Sequence[int] | None = None

    def __init__(self, team: Team, model: Model) -> None:
        family, dtype = model.family, model.weights.dtype
        kinds = tuple(map(AttentionKind, model.ropes, family.kinds))
        leaves = not {"attention_out_norm", "mlp_out_norm"}.isdisjoint(family.norms)
        self.shape = DecoderShape(
            BLOCK_SIZE,
            H,
            INNER,
            N,
            K,
            D,
            VOCAB,
            EPS,
            dtype,
            kinds,
            embed_scale=family.embed_scale,
            logit_softcap=family.logit_softcap,
            leaves_halves=leaves,
        )

        def packed(layer: dict[str, Tensor], number: int) -> PackedLayer:
            products = {
                name: pack(team, [layer[name].to(dtype)], layer.get(f"{name}_bias"), gated=name == "gate_up")
                for name in ("qkv", "o", "gate_up", "down")
            }
            vectors = {name: layer.get(name) for name in (*NORMS, "q_norm", "k_norm", "sinks")}
            return PackedLayer(**vectors, **products, attention=number % len(kinds), gate=family.gate)

        self.team = team
        self.cache = torch.full((16, 3, 2, K, 1, BLOCK_SIZE * D), torch.nan, dtype=dtype)
        outer = PackedOuter(model.norm, pack(team, [model.embed.to(dtype)]), None)
        layers = [packed(layer, i) for i, layer in enumerate(model.layers)]
        self.layers = CompiledLayers(team, self.shape, layers, outer, [self.cache[:, i] for i in range(3)])
        self.memory = StepMemory(team, self.shape)

    def logits(self, chunks: list[tuple[int, Tensor, int]], *, picks: bool = False) -> Tensor:
        """Each chunk: its sequence's number, its tokens, how many came before. Of its last token, [chunks, VOCAB];
        or the likeliest ids, [chunks]."""
        memory, ids = self.memory, torch.cat([tokens for _, tokens, _ in chunks])
        num_new = [len(tokens) for _, tokens, _ in chunks]
        memory.begin(num_new, [start + len(tokens) for _, tokens, start in chunks], len(ids), 4)
        tables = np.arange(16, dtype=np.int32).reshape(4, 4)
        memory.set_tables(tables, [number for number, _, _ in chunks])
        memory.token_ids[: len(ids)] = ids.numpy()
        memory.sampled[: len(chunks)] = np.cumsum(num_new) - 1
        memory.want(len(chunks), picks=picks)
        self.layers.step(memory, 0, 2)
        if self.between is not None:
            self.team.resize(self.between)
        self.layers.step(memory, 2, 3)
        return torch.from_numpy(memory.ids[: len(chunks)].copy()) if picks else memory.logits[: len(chunks)].clone()


def sequences(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_is_what_torch_computes(built: Library, name: str, num_threads: int) -> None:
    team = Team(built, num_threads)
    model = Model(FAMILIES[name], Weights(torch.float32))
    compiled = Compiled(team, model)
    tokens = sequences(50, 3, 20)
    expected = [model.logits(ids) for ids in tokens]
    found = compiled.logits([(s, ids[:-1], 0) for s, ids in enumerate(tokens)])
    torch.testing.assert_close(found, torch.stack([of[-2] for of in expected]), rtol=1e-4, atol=1e-4)
    found = compiled.logits([(s, ids[-1:], len(ids) - 1) for s, ids in enumerate(tokens)])
    torch.testing.assert_close(found, torch.stack([of[-1] for of in expected]), rtol=1e-4, atol=1e-4)
    picked = compiled.logits([(s, ids[-1:], len(ids) - 1) for s, ids in enumerate(tokens)], picks=True)
    assert torch.equal(picked, found.argmax(dim=1))
    team.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rows_bits_are_its_own(built: Library, name: str) -> None:
    """Whole, in chunks, token by token, beside other sequences, with one thread or three."""
    model, tokens = Model(FAMILIES[name], Weights(torch.bfloat16)), sequences(50, 3, 20)
    teams = [Team(built, 1), Team(built, 3)]
    alone, crowd = (Compiled(team, model) for team in teams)
    expected = torch.cat([alone.logits([(s, ids, 0)]) for s, ids in enumerate(tokens)])
    assert expected.isfinite().all()
    assert torch.equal(crowd.logits([(s, ids, 0) for s, ids in enumerate(tokens)]), expected)
    for ends in ([7, 30, 50], [49, 50]):
        for start, end in zip([0, *ends], ends, strict=False):
            found = crowd.logits([(1, tokens[1], 0), (3, tokens[0][start:end], start), (2, tokens[2], 0)])
        assert torch.equal(found, expected[[1, 0, 2]])
    for team in teams:
        team.close()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_rows_bits_do_not_depend_on_threads_that_come_and_go(built: Library, name: str) -> None:
    model, tokens = Model(FAMILIES[name], Weights(torch.bfloat16)), sequences(50, 3, 20)
    teams = [Team(built, 1), Team(built, 4, num_active=2)]
    alone, crowd = (Compiled(team, model) for team in teams)
    expected = torch.cat([alone.logits([(s, ids, 0)]) for s, ids in enumerate(tokens)])
    for before, between in itertools.product([1, 3, 4], [1, 2, 4]):
        teams[1].resize([0] * before)
        crowd.between = [0] * between
        assert torch.equal(crowd.logits([(s, ids, 0) for s, ids in enumerate(tokens)]), expected)
    for team in teams:
        team.close()


def test_families_differ() -> None:
    """What a family has beyond another shows in its logits: else a test of it could not fail."""
    [ids] = sequences(50)
    family = FAMILIES["gemma2"]
    seen = [
        Model(changed, Weights(torch.float32)).logits(ids)[-1]
        for changed in (
            family,
            replace(family, kinds=(AttentionOptions(0.3, 5.0), AttentionOptions(0.3, 5.0))),
            replace(family, kinds=(AttentionOptions(0.3, 0.0, 17), AttentionOptions(0.3))),
            replace(family, embed_scale=1.0),
            replace(family, logit_softcap=0.0),
            replace(family, gate=Epilogue.SILU_MUL),
        )
    ]
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert (one - other).abs().max() > 1e-2
