"""EAGLE-3 and MTP heads written out plainly, straight from the formats: stored names, softmax over all entries so far.

Each head keeps the keys and values of its entries in lists, in place of a paged cache.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

Tensors = dict[str, Tensor]


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x: [T, heads, D]. Returns it rotated: number i and number i + D / 2 of a head by positions * theta^(-2 i / D)."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * theta ** -(torch.arange(half).double() / half)
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class PlainLayer:
    """Grouped-query attention and an MLP of the tensors under `prefix`."""

    def __init__(self, config: dict[str, Any], tensors: Tensors, prefix: str) -> None:
        self.config, self.eps = config, config["rms_norm_eps"]
        self.tensors = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        self.keys: list[Tensor] = []  # of each entry, [K, D]
        self.values: list[Tensor] = []

    def norm(self, x: Tensor, name: str) -> Tensor:
        return normed(x, self.tensors[f"{name}.weight"], self.eps)

    def projected(self, x: Tensor, name: str, heads: int) -> Tensor:
        name = f"self_attn.{name}_proj"
        out = linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))
        return out.view(len(x), heads, -1)

    def attention(self, x: Tensor) -> Tensor:
        """x: [T, inputs], of the entries after those so far. Returns [T, H]."""
        config = self.config
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        q, k, v = (self.projected(x, name, n) for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
        if "self_attn.q_norm.weight" in self.tensors:
            q, k = self.norm(q, "self_attn.q_norm"), self.norm(k, "self_attn.k_norm")
        start = len(self.keys)
        positions = torch.arange(start, start + len(x))
        q, k = turned(q, positions, config["rope_theta"]), turned(k, positions, config["rope_theta"])
        self.keys += k.unbind()
        self.values += v.unbind()
        keys, values = torch.stack(self.keys), torch.stack(self.values)
        out = torch.empty_like(q)
        for t in range(len(x)):
            for head in range(heads):
                of = head * kv_heads // heads
                seen = slice(start + t + 1)
                scores = keys[seen, of] @ q[t, head] / q.shape[2] ** 0.5
                out[t, head] = scores.softmax(0) @ values[seen, of]
        o = "self_attn.o_proj"
        return linear(out.flatten(1), self.tensors[f"{o}.weight"], self.tensors.get(f"{o}.bias"))

    def mlp(self, x: Tensor) -> Tensor:
        gate, up, down = (self.tensors[f"mlp.{of}_proj.weight"] for of in ("gate", "up", "down"))
        return linear(silu(linear(x, gate)) * linear(x, up), down)

    def plain(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x, "input_layernorm"))
        return x + self.mlp(self.norm(x, "post_attention_layernorm"))


class PlainEagle3:
    def __init__(self, config: dict[str, Any], tensors: Tensors, target_embed: Tensor) -> None:
        inner: dict[str, Any] = config.get("transformer_layer_config", config)
        self.config, self.tensors, self.eps = config, tensors, inner["rms_norm_eps"]
        self.embed = tensors.get("embed_tokens.weight", target_embed)
        names = ["midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."]
        names += [f"layers.{i}." for i in range(1, inner["num_hidden_layers"])]
        self.layers = [PlainLayer(inner, tensors, name) for name in names]

    def enter(self, aux: Tensor) -> Tensor:
        if self.config.get("norm_before_fc"):
            aux = normed(aux, self.tensors["input_norm.weight"], self.eps)
        if self.config.get("fc_norm"):
            norms = (self.tensors[f"fc_norm.{i}.weight"] for i in range(3))
            aux = torch.cat([normed(x, w, self.eps) for x, w in zip(aux.chunk(3, 1), norms, strict=True)], dim=1)
        return linear(aux, self.tensors["fc.weight"])

    def forward(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        first, *others = self.layers
        embedded = first.norm(self.embed[token_ids], "input_layernorm")
        own = first.norm(hidden, "hidden_norm")
        residual = own if self.config.get("norm_before_residual") else hidden
        residual = residual + first.attention(torch.cat((embedded, own), dim=1))
        residual = residual + first.mlp(first.norm(residual, "post_attention_layernorm"))
        for layer in others:
            residual = layer.plain(residual)
        return self.final(residual) if self.config.get("norm_output") else residual

    def final(self, hidden: Tensor) -> Tensor:
        return normed(hidden, self.tensors["norm.weight"], self.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        out = hidden if self.config.get("norm_output") else self.final(hidden)
        return linear(out, self.tensors["lm_head.weight"])


class PlainDeepseek(PlainLayer):
    """Latent attention (DeepSeek-V2, 2.1) and a mixture of experts (DeepSeek-V3, 2.1.2) in their place."""

    def attention(self, x: Tensor) -> Tensor:
        config, w = self.config, {n.removeprefix("self_attn."): t for n, t in self.tensors.items()}
        heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        rank, dim = config["kv_lora_rank"], nope + config["v_head_dim"]
        latents = normed(linear(x, w["q_a_proj.weight"]), w["q_a_layernorm.weight"], 1e-6)
        q = linear(latents, w["q_b_proj.weight"]).view(len(x), heads, nope + rope)
        latent, key = linear(x, w["kv_a_proj_with_mqa.weight"]).split((rank, rope), dim=1)
        kv = linear(normed(latent, w["kv_a_layernorm.weight"], 1e-6), w["kv_b_proj.weight"]).view(len(x), heads, dim)
        start = len(self.keys)
        positions, theta = torch.arange(start, start + len(x)), config["rope_theta"]
        q_rope, k_rope = (turned_pairs(of, positions, theta) for of in (q[..., nope:], key[:, None]))
        q = torch.cat((q[..., :nope], q_rope), dim=2)
        self.keys += torch.cat((kv[..., :nope], k_rope.expand(-1, heads, -1)), dim=2).unbind()
        self.values += kv[..., nope:].unbind()
        keys, values = torch.stack(self.keys), torch.stack(self.values)
        out = x.new_empty(len(x), heads, config["v_head_dim"])
        for t in range(len(x)):
            seen = slice(start + t + 1)
            for head in range(heads):
                scores = keys[seen, head] @ q[t, head] / (nope + rope) ** 0.5
                out[t, head] = scores.softmax(0) @ values[seen, head]
        return linear(out.flatten(1), w["o_proj.weight"])

    def mlp(self, x: Tensor) -> Tensor:
        return torch.stack([self.mixture(row) for row in x])

    def mixture(self, row: Tensor) -> Tensor:
        """row: [H]. Of all groups of experts a few, by their two best; of these the best experts."""
        config, gate = self.config, self.tensors["mlp.gate.weight"]
        scores = (gate @ row).sigmoid()
        choice = scores + self.tensors["mlp.gate.e_score_correction_bias"]
        groups = choice.view(config["n_group"], -1)
        best = groups.topk(2, dim=1).values.sum(1).topk(config["topk_group"]).indices
        allowed = torch.zeros_like(groups, dtype=torch.bool)
        allowed[best] = True
        chosen = choice.masked_fill(~allowed.view(-1), -torch.inf).topk(config["num_experts_per_tok"]).indices
        weights = scores[chosen] / scores[chosen].sum() * config["routed_scaling_factor"]
        out = self.expert(row, "mlp.shared_experts.")
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            out = out + weight * self.expert(row, f"mlp.experts.{expert}.")
        return out

    def expert(self, row: Tensor, name: str) -> Tensor:
        gate, up, down = (self.tensors[f"{name}{of}_proj.weight"] for of in ("gate", "up", "down"))
        return down @ (silu(gate @ row) * (up @ row))


def turned_pairs(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x: [T, heads, D]. Returns numbers 2 i and 2 i + 1 of a head rotated by positions * theta^(-2 i / D), the first
    ones before the second ones: a fixed order of both queries and keys."""
    return turned(torch.cat((x[..., ::2], x[..., 1::2]), dim=2), positions, theta)


class PlainMtp:
    """MTP module by DeepSeek-V3's names, whatever those in its file are."""

    def __init__(
        self, layer: PlainLayer, tensors: Tensors, embed: Tensor, lm_head: Tensor, *, norm_output: bool
    ) -> None:
        self.layer, self.tensors, self.norm_output = layer, tensors, norm_output
        self.embed = tensors.get("embed_tokens.weight", embed)
        self.lm_head = tensors.get("shared_head.head.weight", lm_head)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return normed(x, self.tensors[f"{name}.weight"], self.layer.eps)

    def enter(self, aux: Tensor) -> Tensor:
        return aux

    def forward(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        both = torch.cat((self.norm(self.embed[token_ids], "enorm"), self.norm(hidden, "hnorm")), dim=1)
        out = self.layer.plain(linear(both, self.tensors["eh_proj.weight"]))
        return self.norm(out, "shared_head.norm") if self.norm_output else out

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden if self.norm_output else self.norm(hidden, "shared_head.norm"), self.lm_head)
