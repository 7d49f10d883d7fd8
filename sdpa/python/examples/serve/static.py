"""Generation of the same model by transformers, with a static cache."""

from __future__ import annotations

import time
from typing import Any

import torch

from .config import Config


def load(config: Config, weights: dict[str, torch.Tensor]) -> Any:
    """Returns transformers' Llama with these weights, without a copy."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = LlamaConfig(
        vocab_size=config.vocabulary, hidden_size=config.hidden, intermediate_size=config.intermediate, num_hidden_layers=config.layers,
        num_attention_heads=config.heads, num_key_value_heads=config.heads_kv, head_dim=config.dim, max_position_embeddings=config.positions,
        rms_norm_eps=config.eps, rope_parameters={"rope_type": "default", "rope_theta": config.theta}, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(settings)
    model.load_state_dict(weights, assign=True)
    # Its frequencies are in no checkpoint.
    model.model.rotary_emb = LlamaRotaryEmbedding(settings).to(weights["lm_head.weight"].device)
    return model.eval()


def generate(model: Any, requests: list, batch: int, compiled: bool = True) -> tuple[list[list[int]], float]:
    """Generates greedily in batches of requests, in their order. Returns the texts, cut to the lengths of the requests, and the seconds. All batches have the
    same extents, so that they share compiled code; the first one runs before the time is taken. transformers compiles on GPUs only."""
    device = model.lm_head.weight.device
    longest, tokens = max(len(r.prompt) for r in requests), max(r.tokens for r in requests)
    groups = [requests[n : n + batch] for n in range(0, len(requests), batch)]

    def run(group: list) -> list[list[int]]:
        rows = [[0] * (longest - len(r.prompt)) + r.prompt for r in group]
        kept = [[0] * (longest - len(r.prompt)) + [1] * len(r.prompt) for r in group]
        # The last batch is filled up.
        rows, kept = (x + x[:1] * (batch - len(x)) for x in (rows, kept))
        ids, attention_mask = (torch.tensor(x, device=device) for x in (rows, kept))
        made = model.generate(
            ids, attention_mask=attention_mask, max_new_tokens=tokens, do_sample=False, cache_implementation="static", eos_token_id=None, pad_token_id=0,
            disable_compile=not compiled,
        )  # fmt: skip
        return [text[longest:][: r.tokens] for text, r in zip(made.tolist(), group)]

    run(groups[0])
    started = time.perf_counter()
    texts = [text for group in groups for text in run(group)]
    return texts, time.perf_counter() - started
