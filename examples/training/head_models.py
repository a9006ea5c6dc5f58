"""Draft heads as torch modules that can be trained; their parameters have the names under which heads are published.

`unrolled` computes all draft steps of all entries of a row at once, as training-time test does (EAGLE-3, arXiv
2503.01840, section 3): in step k, entry i has the embedding of token i + 1 + k and the hidden state that step k - 1
returned for entry i, and sees the entries up to i of step 0, made of the target's hidden states, and those of its own
earlier steps. So each step sees what it will see when it drafts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

Memory = list[tuple[Tensor, Tensor]]  # keys and values of each step so far, [B, K, T, D]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head; its hidden size is the target's."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float


class Norm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019), in float32 whatever is given."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), self.weight.shape, self.weight, self._eps)


class Attention(nn.Module):
    """Grouped-query attention over `inputs` numbers of each entry."""

    def __init__(self, shape: HeadShape, inputs: int) -> None:
        super().__init__()
        self._shape = shape
        kv_size = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(inputs, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, kv_size, bias=False)
        self.v_proj = nn.Linear(inputs, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """x: [B, T, inputs], of the step after those in `memory`, which gets its keys and values. Returns [B, T, H]."""
        step, dim = len(memory), self._shape.head_dim
        q, k, v = (p(x).unflatten(2, (-1, dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (turned(of, step, self._shape.rope_theta) for of in (q, k))
        memory.append((k, v))
        group = q.shape[1] // k.shape[1]
        keys, values = zip(
            *((k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)) for k, v in memory), strict=False
        )
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = [(q @ keys[0].mT).masked_fill(later, -torch.inf)]
        scores += [(q * own).sum(-1, keepdim=True) for own in keys[1:]]
        weights = (torch.cat(scores, dim=-1).float() * dim**-0.5).softmax(-1).to(v.dtype)
        out = weights[..., : x.shape[1]] @ values[0]
        for i, own in enumerate(values[1:]):
            out = out + weights[..., x.shape[1] + i, None] * own
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Eagle3Layer(nn.Module):
    """SpecForge's `midlayer`."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape, 2 * shape.hidden_size), Mlp(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.eps)
        self.hidden_norm = Norm(shape.hidden_size, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.eps)

    def forward(self, embedded: Tensor, hidden: Tensor, memory: Memory) -> Tensor:
        """embedded, hidden: [B, T, H]. Returns what is fed back, [B, T, H]."""
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=2)
        residual = hidden + self.self_attn(both, memory)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class TrainedEagle3(nn.Module):
    """EAGLE-3 head with `draft_vocab_size` tokens, given three hidden states of a token."""

    def __init__(self, shape: HeadShape, lm_head: Tensor) -> None:
        """lm_head: [draft_vocab_size, H], where its own begins."""
        super().__init__()
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(shape)
        self.norm = Norm(shape.hidden_size, shape.eps)
        self.lm_head = nn.Linear(shape.hidden_size, len(lm_head), bias=False)
        self.lm_head.weight.data.copy_(lm_head)

    def unrolled(self, given: Tensor, embedded: Tensor, num_steps: int) -> Iterator[Tensor]:
        """given: [B, T, 3 H]; embedded: [B, T + num_steps - 1 or more, H], of the tokens from the second on. Yields
        what each step returns, [B, T, H]."""
        hidden, memory = self.fc(given), Memory()
        for step in range(num_steps):
            hidden = self.midlayer(embedded[:, step : step + given.shape[1]], hidden, memory)
            yield hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, H]. Returns [R, draft vocab]."""
        return self.lm_head(self.norm(hidden))


class SharedHead(nn.Module):
    """DeepSeek-V3's `shared_head`, without its matrix: the target's."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.norm = Norm(shape.hidden_size, shape.eps)


class TrainedMtp(nn.Module):
    """MTP module (DeepSeek-V3, arXiv 2412.19437, section 2.2) with an ordinary decoder layer, given the target's final
    normed hidden state."""

    def __init__(self, shape: HeadShape, lm_head: Tensor) -> None:
        """lm_head: [V, H], the target's; not trained."""
        super().__init__()
        self._lm_head = lm_head
        self.enorm = Norm(shape.hidden_size, shape.eps)
        self.hnorm = Norm(shape.hidden_size, shape.eps)
        self.eh_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.self_attn, self.mlp = Attention(shape, shape.hidden_size), Mlp(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.eps)
        self.shared_head = SharedHead(shape)

    def unrolled(self, given: Tensor, embedded: Tensor, num_steps: int) -> Iterator[Tensor]:
        """given: [B, T, H]; the rest as TrainedEagle3 has it."""
        hidden, memory = given, Memory()
        for step in range(num_steps):
            embeds = embedded[:, step : step + given.shape[1]]
            residual = self.eh_proj(torch.cat((self.enorm(embeds), self.hnorm(hidden)), dim=2))
            residual = residual + self.self_attn(self.input_layernorm(residual), memory)
            hidden = residual + self.mlp(self.post_attention_layernorm(residual))
            yield hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, H]. Returns [R, V]."""
        return self.shared_head.norm(hidden) @ self._lm_head.mT


def turned(x: Tensor, first: int, theta: float) -> Tensor:
    """x: [B, heads, T, D], of the positions from `first` on. Returns it rotated (Su et al. 2021)."""
    half = x.shape[3] // 2
    positions = torch.arange(first, first + x.shape[2], dtype=torch.float32)
    angles = positions[:, None] * theta ** -(torch.arange(half) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, other = x[..., :half], x[..., half:]
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=3)
