#!/usr/bin/env python3
"""Models of transformers with random weights, attention by this package beside their own: python3 benches/models_python.py [--device cpu] [--dtype float32]

Llama, Mistral (window) and Gemma 2 (window, softcap), each without padding and with it on either side: logits and gradients of a training step, and what is
generated with a cache that grows and with a static one. Errors are relative, ‖x - exact‖ / ‖exact‖, beside eager attention in f32 on the CPU; eager
attention of the same device and type says how much is the type's own. A token counts as another one where it is not the reference's, and the reference's
two best are further apart than eager attention is off.

Needs PyTorch, transformers, and the wheel of sdpa/python installed: `scripts/python.sh --release` makes it.
"""

import argparse
import copy
import os
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import sdpa.transformers

WORDS, TOKENS, STEPS = 1024, 301, 24
SMALL = {"vocab_size": WORDS, "num_hidden_layers": 4, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def sizes(hidden, heads, of_keys, dim):
    of = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_attention_heads": heads, "num_key_value_heads": of_keys, "head_dim": dim}
    # So that scores are some units apart, as those of models that were trained are.
    return SMALL | of | {"initializer_range": 1.6 / hidden**0.5}


MODELS = {
    "Llama, 8/2 heads of 64": lambda: LlamaForCausalLM(LlamaConfig(**sizes(512, 8, 2, 64))),
    "Mistral, 8/4 heads of 128, window 64": lambda: MistralForCausalLM(MistralConfig(**sizes(1024, 8, 4, 128), sliding_window=64)),
    "Gemma 2, 4/2 heads of 256, softcap 5, window 96": lambda: Gemma2ForCausalLM(
        Gemma2Config(**sizes(512, 4, 2, 256), sliding_window=96, attn_logit_softcapping=5.0, query_pre_attn_scalar=256)
    ),
}

FAILED = []


def batch(padding):
    torch.manual_seed(4)
    ids, keep = torch.randint(2, WORDS, (3, TOKENS)), torch.ones(3, TOKENS, dtype=torch.long)
    if padding == "none":
        return ids, None
    for row, n in enumerate((0, 77, 150)):
        keep[row, :n] = 0
    keep = keep if padding == "left" else keep.flip(-1)
    return ids * keep, keep


def train(of, ids, keep):
    """Logits of what is no padding, and all gradients as one row, of a step."""
    of.train().zero_grad()
    ids, keep = ids.to(of.device), None if keep is None else keep.to(of.device)
    # What a padded query predicts is nobody's: it attends to nothing here, and to everything alike in eager mode.
    known = torch.ones_like(ids) if keep is None else keep * torch.nn.functional.pad(keep, (1, 0))[:, :-1]
    made = of(input_ids=ids, attention_mask=keep, labels=ids.masked_fill(known == 0, -100))
    made.loss.backward()
    logits = made.logits.detach() if keep is None else made.logits.detach()[keep.bool()]
    return logits.float().cpu().flatten(), {n: p.grad.float().cpu().flatten() for n, p in of.named_parameters() if p.grad is not None}


class Forced(transformers.LogitsProcessor):
    """Generates these tokens, whatever a model makes of them."""

    def __init__(self, tokens, behind):
        self.tokens, self.behind = tokens, behind

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -torch.inf).scatter(1, self.tokens[:, input_ids.shape[1] - self.behind].unsqueeze(1), 0.0)


def decode(of, ids, keep, cache, tokens=None):
    """Logits of each step with a cache, and the tokens: the best ones, or those that are given."""
    ids, keep = ids.to(of.device), None if keep is None else keep.to(of.device)
    forced = [] if tokens is None else [Forced(tokens.to(of.device), ids.shape[1])]
    told = {"max_new_tokens": STEPS, "do_sample": False, "use_cache": True, "cache_implementation": cache} | ({} if cache is None else {"disable_compile": True})
    keep = torch.ones_like(ids) if keep is None else keep
    made = of.eval().generate(ids, attention_mask=keep, logits_processor=forced, output_logits=True, return_dict_in_generate=True, **told)
    return torch.stack(made.logits).float().cpu(), made.sequences[:, ids.shape[1] :].cpu()


def off(x, exact):
    return ((x - exact).norm() / exact.norm()).item()


def row(name, what, ours, own, dtype, words="", wrong=0):
    """A row of the table. Ours may be off by twice of what eager attention is, and the last of its digits: in f32 on the CPU eager attention is the
    reference itself."""
    fine = ours <= 2 * own + (2 if dtype != torch.float32 else 100) * torch.finfo(dtype).eps and not wrong
    if not fine:
        FAILED.append(f"{name}, {what}")
    print(f"| {name} | {what} | {ours:.2e} | {own:.2e} | {words} | {'ok' if fine else 'FAIL'} |", flush=True)


def check(name, device, dtype):
    torch.manual_seed(3)
    exact = MODELS[name]().to(dtype)
    own = copy.deepcopy(exact).to(device)
    exact = exact.float()
    ours = copy.deepcopy(own)
    for of, implementation in ((exact, "eager"), (own, "eager"), (ours, "rust_attention")):
        of.set_attn_implementation(implementation)
    for padding in ("none", "right", "left"):
        given = batch(padding)
        (logits, gradients), (logits_own, gradients_own), (logits_ours, gradients_ours) = (train(of, *given) for of in (exact, own, ours))
        row(name, f"logits, padding {padding}", off(logits_ours, logits), off(logits_own, logits), dtype)
        assert gradients.keys() == gradients_own.keys() == gradients_ours.keys()
        all_of = lambda x: torch.cat([x[n] for n in gradients])  # noqa: E731
        off_ours, off_own = ({n: off(x[n], gradients[n]) for n in gradients} for x in (gradients_ours, gradients_own))
        worst = max(gradients, key=lambda n: off_ours[n] / (off_own[n] + torch.finfo(dtype).eps))
        words = f"worst beside eager's: {worst}, {off_ours[worst]:.2e} and {off_own[worst]:.2e}"
        row(name, f"gradients, padding {padding}", off(all_of(gradients_ours), all_of(gradients)), off(all_of(gradients_own), all_of(gradients)), dtype, words)
    for padding in ("none", "left"):
        given = batch(padding)
        logits, tokens = decode(exact, *given, None)
        best = logits.topk(2).values
        for cache in (None, "static"):
            (logits_own, _), (logits_ours, _) = (decode(of, *given, cache, tokens) for of in (own, ours))
            other = logits_ours.argmax(-1) != logits.argmax(-1)
            tied = best[..., 0] - best[..., 1] <= 2 * (logits_own - logits).abs().amax(-1)
            words = f"{other.numel()} tokens, {int((~other).sum())} the same, {int((other & tied).sum())} others near ties, {int((other & ~tied).sum())} wrong"
            what = f"{STEPS} steps, {'growing' if cache is None else cache} cache, padding {padding}"
            row(name, what, off(logits_ours, logits), off(logits_own, logits), dtype, words, int((other & ~tied).sum()))


def main():
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    asked = asked.parse_args()
    transformers.logging.set_verbosity_error()
    sdpa.transformers.register()
    where = torch.cuda.get_device_name() if asked.device.startswith("cuda") else "CPU"
    print(f"{where}, {asked.dtype}, PyTorch {torch.__version__}, transformers {transformers.__version__}")
    print("| model, random weights | | off f32: ours | eager | | |\n|---|---|---|---|---|---|")
    for name in MODELS:
        start = time.perf_counter()
        try:
            check(name, asked.device, getattr(torch, asked.dtype))
        except Exception as e:  # noqa: BLE001 - told, and counted
            FAILED.append(name)
            print(f"| {name} | {type(e).__name__}: {str(e).splitlines()[0]} | | | | FAIL |", flush=True)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print(f"\n{len(FAILED)} failed{': ' + '; '.join(FAILED) if FAILED else ''}")
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
