"""A Llama model over packed tokens. The caller provides attention."""

from __future__ import annotations

from typing import Callable

import torch
import torch.nn.functional as F

from .config import Config

# Attention of a layer: number of the layer, and q, k, v of (tokens, heads, dim).
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Decoder:
    def __init__(self, config: Config, weights: dict[str, torch.Tensor]):
        self.config, self.weights = config, weights
        self.layers = [self._layer(f"model.layers.{n}.") for n in range(config.layers)]
        self.embedding, self.norm, self.head = (weights[f"{name}.weight"] for name in ("model.embed_tokens", "model.norm", "lm_head"))
        device, dtype = self.embedding.device, self.embedding.dtype
        frequency = 1.0 / config.theta ** (torch.arange(0, config.dim, 2, device=device).float() / config.dim)
        angle = torch.outer(torch.arange(config.positions, device=device).float(), frequency).repeat(1, 2)
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def _layer(self, prefix: str) -> dict[str, torch.Tensor]:
        of = lambda *names: torch.cat([self.weights[f"{prefix}{name}.weight"] for name in names])  # noqa: E731
        return {
            "before": of("input_layernorm"), "after": of("post_attention_layernorm"), "o": of("self_attn.o_proj"), "down": of("mlp.down_proj"),
            "qkv": of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "up": of("mlp.gate_proj", "mlp.up_proj"),
        }  # fmt: skip

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Returns the hidden states (tokens, hidden) of tokens at these positions of their sequences."""
        heads, heads_kv, dim = self.config.heads, self.config.heads_kv, self.config.dim
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x = self.embedding[ids]
        for n, layer in enumerate(self.layers):
            qkv = F.linear(self._normalised(x, layer["before"]), layer["qkv"]).view(-1, heads + 2 * heads_kv, dim)
            qk, v = qkv.split([heads + heads_kv, heads_kv], 1)
            left, right = qk.chunk(2, -1)
            q, k = (qk * cos + torch.cat([-right, left], -1) * sin).split([heads, heads_kv], 1)
            x = x + F.linear(attend(n, q, k, v).flatten(1), layer["o"])
            gate, up = F.linear(self._normalised(x, layer["after"]), layer["up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logits of hidden states, in f32."""
        return F.linear(self._normalised(x, self.norm), self.head).float()

    def _normalised(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.config.hidden,), weight, self.config.eps)
