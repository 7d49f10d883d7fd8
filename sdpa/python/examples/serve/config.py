"""The extents of a Llama model, and random weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Config:
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    heads_kv: int
    dim: int
    # The most tokens of a sequence.
    positions: int
    eps: float = 1e-5
    theta: float = 10_000.0


MODELS = {
    "small": Config(4, 64, 96, 96, 4, 2, 16, 128),
    # The extents of Llama 3.2 1B, with a smaller vocabulary.
    "1b": Config(16, 2048, 8192, 32_000, 32, 8, 64, 4096),
}


def weights(config: Config, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns random weights under the names of a Llama checkpoint. Their size keeps activations and logits near 1, so that texts vary."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int, size: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator, device=device) * size).to(dtype)

    def ones() -> torch.Tensor:
        return torch.ones(config.hidden, dtype=dtype, device=device)

    hidden, inner = config.hidden, config.heads * config.dim
    linear = {
        "self_attn.q_proj": (inner, hidden), "self_attn.k_proj": (config.heads_kv * config.dim, hidden), "self_attn.v_proj": (config.heads_kv * config.dim, hidden),
        "self_attn.o_proj": (hidden, inner), "mlp.gate_proj": (config.intermediate, hidden), "mlp.up_proj": (config.intermediate, hidden),
        "mlp.down_proj": (hidden, config.intermediate),
    }  # fmt: skip
    made = {"model.embed_tokens.weight": matrix(config.vocabulary, hidden, 1.0)}
    for layer in range(config.layers):
        for name, (rows, columns) in linear.items():
            made[f"model.layers.{layer}.{name}.weight"] = matrix(rows, columns, columns**-0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"model.layers.{layer}.{name}.weight"] = ones()
    made["model.norm.weight"] = ones()
    made["lm_head.weight"] = matrix(config.vocabulary, hidden, hidden**-0.5)
    return made
