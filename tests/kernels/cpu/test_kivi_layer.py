"""Steps of a compiled decoder over 4-bit KV with a tail, against the same in torch, and their bits in other steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from diptych.kernels.attention.kivi_attention import kivi_attention
from diptych.kernels.attention.paged_attention import paged_attention_twin
from diptych.kernels.attention.paged_batch import AttentionOptions
from diptych.kernels.cpu.attention import unpack
from diptych.kernels.cpu.layer import AttentionKind, CompiledLayers, DecoderShape, PackedLayer, PackedOuter, StepMemory
from diptych.kernels.cpu.library import Library, Team
from diptych.kernels.cpu.linear import pack
from diptych.kernels.kv.kivi import GROUP, block_bytes, round_blocks
from diptych.kernels.kv.rope_kv_write import rotate_twin

from ...support.paged import make_batch, make_cache
from ..kivi_cases import NUM_BLOCKS, make_step

H, INNER, N, K, D, VOCAB, EPS = 48, 80, 4, 2, 32, 70, 1e-5
NUM_LAYERS, NUM_SEQS, WIDTH = 3, 4, 5
OPTIONS = AttentionOptions(window=50), AttentionOptions(softcap=20.0)  # of layers in turn
CLOSE = 5e-2  # a number in the middle between two codes may become another one, by the last bit of its key


class Decoder:
    """Layers of a llama with sinks, as torch computes them."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(5)

        def made(*shape: int, size: float = 0.3) -> Tensor:
            return (size * torch.randn(shape, generator=generator)).to(dtype).float()

        shapes = {"qkv": ((N + 2 * K) * D, H), "o": (H, N * D), "gate_up": (2 * INNER, H), "down": (H, INNER)}
        self.layers = [{name: made(*shape) for name, shape in shapes.items()} for _ in range(NUM_LAYERS)]
        self.sinks = [made(N, size=1.0) for _ in range(NUM_LAYERS)]
        self.embed, self.norm = made(VOCAB, H, size=1.0), torch.ones(H)
        angles = torch.arange(NUM_BLOCKS * 2.0)[:, None] * 20.0 ** -torch.linspace(0, 1, D // 2)
        self.rope = torch.cat((angles.cos(), angles.sin()), dim=1)

    def logits(self, ids: Tensor, *, is_rounded: bool = True) -> Tensor:
        """Of every token of a sequence, [T, VOCAB] float32; not is_rounded: with KV at full width."""
        x, length = self.embed[ids], len(ids)
        batch = make_batch([length], [length], GROUP, NUM_BLOCKS)
        for number, layer in enumerate(self.layers):
            heads = (self.normed(x) @ layer["qkv"].T).view(length, -1, D)
            q, k, v = heads.split((N, K, K), dim=1)
            q, k = (rotate_twin(part, self.rope[:length]) for part in (q, k))
            kind = OPTIONS[number % 2]
            options = AttentionOptions(kind.scale, kind.softcap, kind.window, self.sinks[number])
            if is_rounded:
                step = make_step(batch, [torch.stack((k, v), dim=1)])
                attended = kivi_attention(q, step.pool, step.tail, batch, step.slots, options)
            else:
                cache = make_cache(batch, NUM_BLOCKS, K, D, torch.float32)
                at = torch.arange(length)
                cache[batch.block_tables[0].long()[at // GROUP], :, at % GROUP] = torch.stack((k, v), dim=1)
                attended = paged_attention_twin(q, cache, batch, options)
            x = x + attended.flatten(1) @ layer["o"].T
            gate, up = (self.normed(x) @ layer["gate_up"].T).chunk(2, dim=1)
            x = x + (functional.silu(gate) * up) @ layer["down"].T
        return self.normed(x) @ self.embed.T

    def normed(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.norm.shape, self.norm, EPS)


@dataclass(frozen=True)
class Chunk:
    seq: int
    ids: Tensor
    start: int  # tokens before it


class Compiled:
    """The same by the kernels. Sequence s has the pool's blocks WIDTH s to WIDTH s + WIDTH - 1; those of the tail that
    no token waits in are NaN."""

    def __init__(self, team: Team, decoder: Decoder, dtype: torch.dtype) -> None:
        kinds = tuple(AttentionKind(decoder.rope, options) for options in OPTIONS)
        shape = DecoderShape(GROUP, H, INNER, N, K, D, VOCAB, EPS, dtype, kinds)

        def packed(number: int) -> PackedLayer:
            weights = {
                name: pack(team, [weight.to(dtype)], None, gated=name == "gate_up")
                for name, weight in decoder.layers[number].items()
            }
            vectors = dict.fromkeys(("attention_out_norm", "mlp_out_norm", "q_norm", "k_norm"))
            vectors |= {"input_norm": decoder.norm, "mlp_norm": decoder.norm, "sinks": decoder.sinks[number]}
            return PackedLayer(**vectors, **weights, attention=number % 2)

        self.pool = torch.full((NUM_SEQS * WIDTH, NUM_LAYERS, 2, K, block_bytes(D)), 0xFF, dtype=torch.uint8)
        self.tail = torch.full((9, NUM_LAYERS, 2, K, 2, 16 * D), torch.nan, dtype=dtype)
        outer = PackedOuter(decoder.norm, pack(team, [decoder.embed.to(dtype)]), None)
        pools, tails = self.pool.unbind(1), self.tail.unbind(1)
        self.layers = CompiledLayers(team, shape, list(map(packed, range(NUM_LAYERS))), outer, pools, tails=tails)
        self.memory = StepMemory(team, shape)
        self.waiting: dict[tuple[int, int], int] = {}  # the tail's block of a sequence's block
        self.free = list(range(len(self.tail)))

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Of the last token of each chunk, [chunks, VOCAB]."""
        memory, num_new = self.memory, [len(chunk.ids) for chunk in chunks]
        memory.begin(num_new, [chunk.start + len(chunk.ids) for chunk in chunks], sum(num_new), WIDTH)
        memory.set_tables(np.arange(NUM_SEQS * WIDTH, dtype=np.int32).reshape(-1, WIDTH), [c.seq for c in chunks])
        memory.set_tails([tail for chunk in chunks for tail in self.tails_of(chunk)])
        memory.token_ids[: sum(num_new)] = torch.cat([chunk.ids for chunk in chunks]).numpy()
        memory.sampled[: len(chunks)] = np.cumsum(num_new) - 1
        memory.want(len(chunks), picks=False)
        self.layers.step(memory, 0, 2)
        self.layers.step(memory, 2, NUM_LAYERS)
        for chunk in chunks:
            self.drop_full(chunk)
        return memory.logits[: len(chunks)].clone()

    def tails_of(self, chunk: Chunk) -> Iterator[int]:
        for number in range(chunk.start // GROUP, (chunk.start + len(chunk.ids) - 1) // GROUP + 1):
            if (chunk.seq, number) not in self.waiting:
                self.waiting[chunk.seq, number] = self.free.pop(0)
            yield self.waiting[chunk.seq, number]

    def drop_full(self, chunk: Chunk) -> None:
        """The blocks that the step filled are what the twin makes of their tail, which others may have now."""
        for number in range(chunk.start // GROUP, (chunk.start + len(chunk.ids)) // GROUP):
            block = self.waiting.pop((chunk.seq, number))
            for layer in range(NUM_LAYERS):
                expected = torch.empty_like(self.pool[:1, layer])
                round_blocks(unpack(self.tail[block : block + 1, layer]), expected, torch.zeros(1, 2).long())
                assert torch.equal(self.pool[chunk.seq * WIDTH + number, layer], expected[0])
            self.tail[block] = torch.nan
            self.free.append(block)


def sequences(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_is_what_torch_computes(built: Library, num_threads: int) -> None:
    team, decoder = Team(built, num_threads), Decoder(torch.float32)
    compiled, tokens = Compiled(team, decoder, torch.float32), sequences(120, 3, 64)
    expected = [decoder.logits(ids) for ids in tokens]
    found = compiled.logits([Chunk(s, ids[:-1], 0) for s, ids in enumerate(tokens)])
    torch.testing.assert_close(found, torch.stack([of[-2] for of in expected]), rtol=1e-3, atol=CLOSE)
    found = compiled.logits([Chunk(s, ids[-1:], len(ids) - 1) for s, ids in enumerate(tokens)])
    torch.testing.assert_close(found, torch.stack([of[-1] for of in expected]), rtol=1e-3, atol=CLOSE)
    assert (decoder.logits(tokens[0], is_rounded=False)[-1] - expected[0][-1]).abs().max() > 20 * CLOSE
    team.close()


def test_a_rows_bits_are_its_own(built: Library, dtype: torch.dtype) -> None:
    """Whole, in chunks, token by token, beside other sequences, with one thread or three."""
    decoder, tokens = Decoder(dtype), sequences(120, 3, 64)
    teams = [Team(built, 1), Team(built, 3)]
    alone = Compiled(teams[0], decoder, dtype)
    expected = torch.cat([alone.logits([Chunk(s, ids, 0)]) for s, ids in enumerate(tokens)])
    assert expected.isfinite().all()
    ends_of = [120], [31, 32, 33, 96, 119, 120], [64, 100, 120], list(range(1, 121))
    for team, ends in zip((teams[1], *teams, teams[1]), ends_of, strict=True):
        crowd = Compiled(team, decoder, dtype)
        for start, end in zip([0, *ends], ends, strict=False):
            own = Chunk(3, tokens[0][start:end], start)
            beside = [Chunk(1, tokens[1], 0), Chunk(2, tokens[2], 0)] if end == 120 else []
            found = crowd.logits([*beside[:1], own, *beside[1:]])
        assert torch.equal(found, expected[[1, 0, 2]])
    for team in teams:
        team.close()


def test_a_step_may_be_computed_again(pair: Team) -> None:
    """From the middle of a block, with other tokens: what a rejected draft wrote, and rounded, is written again."""
    decoder, [ids] = Decoder(torch.float32), sequences(100)
    compiled = Compiled(pair, decoder, torch.float32)
    expected = compiled.logits([Chunk(0, ids, 0)])
    again = Compiled(pair, decoder, torch.float32)
    again.logits([Chunk(0, ids[:90], 0)])
    kept = again.waiting.copy(), list(again.free), again.tail.clone()
    again.logits([Chunk(0, ids[:9], 90)])  # fills the block
    again.waiting, again.free = kept[0], kept[1]
    again.tail.copy_(kept[2])
    assert torch.equal(again.logits([Chunk(0, ids[90:], 90)]), expected)
