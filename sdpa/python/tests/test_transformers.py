"""Tiny models of transformers with random weights, on the CPU in f32, beside their own eager attention: outputs, gradients, generated tokens."""

import pytest
import textbook
import torch
import transformers
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import sdpa
import sdpa.transformers

sdpa.transformers.register()

SMALL = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=6)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, sliding_window=5, attn_logit_softcapping=5.0, query_pre_attn_scalar=16)),
}


def model(name):
    torch.manual_seed(3)
    return MODELS[name]().train()


def batch(left=False):
    torch.manual_seed(4)
    ids = torch.randint(2, 97, (3, 19))
    keep = torch.ones_like(ids)
    for row, n in enumerate((0, 7, 12)):
        keep[row, :n] = 0
    keep = keep if left else keep.flip(-1)
    return ids * keep, keep


def train(of, implementation, ids, keep):
    of.set_attn_implementation(implementation)
    of.zero_grad()
    # What a padded query predicts is nobody's: it attends to nothing here, and to everything alike in eager mode.
    known = torch.ones_like(ids) if keep is None else keep * torch.nn.functional.pad(keep, (1, 0))[:, :-1]
    labels = ids.masked_fill(known == 0, -100)
    result = of(input_ids=ids, attention_mask=keep, labels=labels)
    result.loss.backward()
    return result.logits.detach(), {n: p.grad.clone() for n, p in of.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_outputs_and_gradients(name, padding):
    of = model(name)
    ids, keep = batch(padding == "left")
    keep = None if padding == "none" else keep
    logits, gradients = train(of, "eager", ids, keep)
    ours, own = train(of, "rust_attention", ids, keep)
    real = slice(None) if keep is None else keep.bool()
    assert (ours[real] - logits[real]).abs().max() < 2e-4 * logits[real].abs().max()
    assert own.keys() == gradients.keys() and len(own) > 20
    for n, gradient in gradients.items():
        assert (own[n] - gradient).abs().max() <= 2e-4 * gradient.abs().max() + 1e-7, n


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_with_a_cache_gives_the_same_tokens(name, cache):
    of = model(name).eval()
    ids, keep = batch(left=True)
    told = {"max_new_tokens": 12, "do_sample": False, "use_cache": True, "cache_implementation": cache}
    if cache is not None:
        told["disable_compile"] = True
    tokens = {}
    for implementation in ("eager", "rust_attention"):
        of.set_attn_implementation(implementation)
        tokens[implementation] = of.generate(ids, attention_mask=keep, **told)
    assert tokens["eager"].shape == (3, 31) and torch.equal(tokens["eager"], tokens["rust_attention"])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("left", [False, True])
def test_a_growing_cache_where_lengths_are_planned(name, left, monkeypatch):
    """What is done on a GPU, on the CPU: one plan for a room of keys, whatever the length."""
    import sdpa.op

    of = model(name).eval()
    ids, keep = batch(left=True)
    keep = keep if left else torch.ones_like(keep)
    told = {"max_new_tokens": 20, "do_sample": False, "use_cache": True}
    of.set_attn_implementation("eager")
    wanted = of.generate(ids, attention_mask=keep, **told)
    of.set_attn_implementation("rust_attention")
    monkeypatch.setattr(sdpa.transformers, "PLANNED", ("cpu",))
    monkeypatch.setattr(sdpa.transformers, "ROOM", 32)
    sdpa.op._PLANS.clear()
    assert torch.equal(of.generate(ids, attention_mask=keep, **told), wanted)
    # The prompt, and two rooms, for each kind of layer, at each alignment that memory has.
    lengths = {(key[0], key[4][1][0]) for key in sdpa.op._PLANS}
    assert len(lengths) <= 6, lengths


def test_packed_sequences_of_one_row():
    of = model("llama")
    ids, _ = batch()
    places = torch.cat([torch.arange(n) for n in (4, 9, 6)])[None].expand(3, -1)
    logits = {}
    for implementation in ("eager", "rust_attention"):
        of.set_attn_implementation(implementation)
        logits[implementation] = of(input_ids=ids, position_ids=places, use_cache=False).logits
    assert (logits["eager"] - logits["rust_attention"]).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_as_tensors(dtype):
    of = model("llama").eval()
    ids, _ = batch()
    truth = torch.rand(3, 1, 19, 19) < 0.5
    truth |= torch.eye(19, dtype=torch.bool)
    of.set_attn_implementation("eager")
    wanted = of(input_ids=ids, attention_mask=torch.where(truth, 0.0, -1e9)).logits
    of.set_attn_implementation("rust_attention")
    given = truth if dtype == torch.bool else torch.where(truth, 0.0, -1e9)
    assert (of(input_ids=ids, attention_mask=given).logits - wanted).abs().max() < 1e-3


def test_what_other_models_pass():
    """Sinks, biases of positions, a bias that is the same for all heads."""
    q, k, v = (torch.randn(2, heads, 9, 16, requires_grad=True) for heads in (4, 2, 2))
    layer = torch.nn.Module()
    sinks = torch.randn(4, requires_grad=True)
    for given in ({"s_aux": sinks}, {"position_bias": torch.randn(1, 4, 9, 9, requires_grad=True)}, {"position_bias": torch.randn(2, 1, 9, 9, requires_grad=True)}):
        o, _ = sdpa.transformers.attention(layer, q, k, v, None, scaling=0.3, is_causal=True, **given)
        bias = given.get("position_bias")
        added = None if bias is None else lambda s, b, h, i, j, bias=bias: s + bias
        wanted = textbook.attention(q, k, v, added, lambda b, h, i, j: i >= j, scale=0.3, sink=given.get("s_aux"))[0].transpose(1, 2)
        textbook.close(o, wanted, "o")
        wrt = [q, k, v, *given.values()]
        for x, y in zip(torch.autograd.grad(o.square().sum(), wrt), torch.autograd.grad(wanted.square().sum(), wrt)):
            textbook.close(x, y, "gradient", 1e-4)
    with pytest.raises(sdpa.SpecError, match="several of them"):
        sdpa.transformers.attention(layer, q, k, v, None, softcap=3.0, position_bias=torch.randn(1, 4, 9, 9))


def test_what_is_not_covered_is_said():
    torch.manual_seed(3)
    of = LlamaForCausalLM(LlamaConfig(**SMALL, attention_dropout=0.1)).train()
    of.set_attn_implementation("rust_attention")
    with pytest.raises(sdpa.SpecError, match="attention_dropout is 0.1"):
        of(input_ids=batch()[0])
    with pytest.raises(sdpa.SpecError, match="name"):
        sdpa.transformers.register("rust_sdpa")
    assert transformers.__version__


def test_checkpointed_layers():
    of = model("gemma2")
    ids, keep = batch()
    _, wanted = train(of, "rust_attention", ids, keep)
    of.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, ours = train(of, "rust_attention", ids, keep)
    assert all(torch.allclose(ours[n], wanted[n], atol=1e-6) for n in wanted)
