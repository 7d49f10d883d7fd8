"""Tiny transformers models with random weights against their own eager attention: outputs, gradients, caches. On the CPU in f32, and on a GPU, if there is one,
in bf16 against eager attention in f32."""

import copy

import pytest
import textbook
import torch
import transformers
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, T5Config, T5ForConditionalGeneration

import sdpa
import sdpa.transformers
from sdpa import eager, op

sdpa.transformers.register()

SMALL = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=6)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, sliding_window=5, attn_logit_softcapping=1.0, query_pre_attn_scalar=16)),
}


DTYPES = {"cpu": torch.float32} | ({"cuda": torch.bfloat16} if torch.cuda.is_available() else {})
on_devices = pytest.mark.parametrize("device", DTYPES)


def model(name, device="cpu"):
    torch.manual_seed(3)
    return MODELS[name]().to(device, DTYPES[device]).train()


def batch(left=False, device="cpu"):
    torch.manual_seed(4)
    ids = torch.randint(2, 97, (3, 19))
    keep = torch.ones_like(ids)
    for row, n in enumerate((0, 7, 12)):
        keep[row, :n] = 0
    keep = keep if left else keep.flip(-1)
    return (ids * keep).to(device), keep.to(device)


def of_each(of, run):
    """Returns the results of `run` for a model with our attention, with its own, and with its own in f32."""
    given = []
    for implementation, made in (("rust_attention", of), ("eager", of), ("eager", copy.deepcopy(of).float())):
        made.set_attn_implementation(implementation)
        given.append(run(made))
    return given


def near(ours, own, exact, what):
    """In f32, the error is at most 3e-4 of the largest element. In 16 bits it is at most twice that of eager attention in 16 bits, plus 1 %."""
    if ours.dtype == torch.float32:
        assert (ours - own).abs().max() <= 3e-4 * exact.abs().max() + 1e-7, what
        return
    error, allowed = (ours.float() - exact).norm(), 2 * (own.float() - exact).norm() + 0.01 * exact.norm()
    assert exact.norm() > 0 and error <= allowed, f"{what}: {error} is more than {allowed}"


def train(of, ids, keep):
    of.zero_grad()
    # The prediction of a padded query is unused: it attends to no key here, and equally to all keys in eager mode.
    known = torch.ones_like(ids) if keep is None else keep * torch.nn.functional.pad(keep, (1, 0))[:, :-1]
    labels = ids.masked_fill(known == 0, -100)
    result = of(input_ids=ids, attention_mask=keep, labels=labels)
    result.loss.backward()
    return result.logits.detach(), {n: p.grad.clone() for n, p in of.named_parameters() if p.grad is not None}


@on_devices
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_outputs_and_gradients(name, padding, device):
    ids, keep = batch(padding == "left", device)
    keep = None if padding == "none" else keep
    given = of_each(model(name, device), lambda of: train(of, ids, keep))
    real = slice(None) if keep is None else keep.bool()
    near(*(logits[real] for logits, _ in given), "logits")
    gradients = [gradients for _, gradients in given]
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 20
    for n in gradients[0]:
        near(*(of[n] for of in gradients), n)


class Forced(transformers.LogitsProcessor):
    """Generates these tokens, whatever the model predicts."""

    def __init__(self, tokens, behind):
        self.tokens, self.behind = tokens, behind

    def __call__(self, input_ids, scores):
        forced = self.tokens[:, input_ids.shape[1] - self.behind].unsqueeze(1)
        return torch.full_like(scores, -torch.inf).scatter(1, forced, 0.0)


CACHES = pytest.mark.parametrize("cache", [None, "static"])


def told(cache, n):
    """Returns the options of generation. Compilation is tested elsewhere."""
    return {"max_new_tokens": n, "do_sample": False, "use_cache": True, "cache_implementation": cache} | ({} if cache is None else {"disable_compile": True})


@on_devices
@pytest.mark.parametrize("name", MODELS)
@CACHES
def test_decoding_with_a_cache_gives_the_same_logits(name, cache, device):
    ids, keep = batch(left=True, device=device)
    tokens = torch.randint(2, 97, (3, 12), generator=torch.Generator().manual_seed(6)).to(device)

    def decode(of):
        forced = transformers.LogitsProcessorList([Forced(tokens, ids.shape[1])])
        of = of.eval()
        made = of.generate(ids, attention_mask=keep, logits_processor=forced, output_logits=True, return_dict_in_generate=True, **told(cache, 12))
        assert torch.equal(made.sequences[:, ids.shape[1] :], tokens)
        return torch.stack(made.logits).to(of.dtype)

    ours, own, exact = of_each(model(name, device), decode)
    assert ours.shape == (12, 3, 97)
    for step in range(12):
        near(ours[step], own[step], exact[step], f"step {step}")


@pytest.mark.parametrize("name", MODELS)
@CACHES
def test_generation_with_a_cache_gives_the_same_tokens(name, cache):
    of = model(name).eval()
    ids, keep = batch(left=True)
    tokens = {}
    for implementation in ("eager", "rust_attention"):
        of.set_attn_implementation(implementation)
        tokens[implementation] = of.generate(ids, attention_mask=keep, **told(cache, 12))
    assert tokens["eager"].shape == (3, 31) and torch.equal(tokens["eager"], tokens["rust_attention"])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("left", [False, True])
def test_a_growing_cache_where_lengths_are_planned(name, left, monkeypatch):
    """Runs the code path of GPUs on the CPU: one plan per cache range, for any length."""
    of = model(name).eval()
    ids, keep = batch(left=True)
    keep = keep if left else torch.ones_like(keep)
    of.set_attn_implementation("eager")
    wanted = of.generate(ids, attention_mask=keep, **told(None, 20))
    of.set_attn_implementation("rust_attention")
    monkeypatch.setattr(sdpa.transformers, "PLANNED", ("cpu",))
    monkeypatch.setattr(sdpa.transformers, "ROOM", 32)
    eager._WAYS.clear()
    op._PLANS.clear()
    assert torch.equal(of.generate(ids, attention_mask=keep, **told(None, 20)), wanted)
    # The prompt and two cache ranges, for each kind of layer and each memory alignment.
    lengths = {(key[0], key[4][1][0]) for key in op._PLANS}
    assert len(lengths) <= 6, lengths


@on_devices
def test_an_offset_is_read_when_a_mask_is_made(device):
    """Static caches increment their tensor before a layer attends."""
    at, (q, k, v) = torch.tensor(3, device=device), operands(device)
    made = sdpa.transformers.mask(2, 1, 9, q_offset=at, device=device)
    at.add_(2)
    o, _ = sdpa.transformers.attention(torch.nn.Module(), q[:, :, :1], k, v, made, scaling=0.3)
    wanted = textbook.attention(q[:, :, :1], k, v, None, lambda b, h, i, j: j <= i + 3, scale=0.3)[0].transpose(1, 2)
    textbook.close(o, wanted, "o", LIMITS[device][0])


@on_devices
def test_packed_sequences_of_one_row(device):
    ids, _ = batch(device=device)
    places = torch.cat([torch.arange(n) for n in (4, 9, 6)])[None].expand(3, -1).to(device)
    near(*of_each(model("llama", device), lambda of: of(input_ids=ids, position_ids=places, use_cache=False).logits.detach()), "logits")


@on_devices
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_as_tensors(dtype, device):
    ids, _ = batch(device=device)
    truth = torch.rand(3, 1, 19, 19) < 0.5
    truth = (truth | torch.eye(19, dtype=torch.bool)).to(device)

    def run(of):
        added = torch.where(truth, 0.0, -1e9).to(of.dtype)
        given = truth if dtype == torch.bool and of.config._attn_implementation != "eager" else added
        return of(input_ids=ids, attention_mask=given).logits.detach()

    near(*of_each(model("llama", device).eval(), run), "logits")


# Limits for comparisons with the textbook in f64.
LIMITS = {"cpu": (2e-5, 1e-4), "cuda": (2e-2, 3e-2)}


def operands(device):
    return [torch.randn(2, heads, 9, 16).to(device, DTYPES[device]).requires_grad_() for heads in (4, 2, 2)]


@on_devices
def test_what_other_models_pass(device):
    """Sinks, position biases, a bias that is equal for all heads."""
    layer, (q, k, v) = torch.nn.Module(), operands(device)
    sinks = torch.randn(4, device=device, requires_grad=True)
    biases = [torch.randn(shape).to(device, DTYPES[device]).requires_grad_() for shape in ((1, 4, 9, 9), (2, 1, 9, 9))]
    for given in ({"s_aux": sinks}, *({"position_bias": bias} for bias in biases)):
        o, _ = sdpa.transformers.attention(layer, q, k, v, None, scaling=0.3, is_causal=True, **given)
        bias = given.get("position_bias")
        added = None if bias is None else lambda s, b, h, i, j, bias=bias: s + bias
        wanted = textbook.attention(q, k, v, added, lambda b, h, i, j: i >= j, scale=0.3, sink=given.get("s_aux"))[0].transpose(1, 2)
        textbook.close(o, wanted, "o", LIMITS[device][0])
        wrt = [q, k, v, *given.values()]
        up = torch.randn_like(o)
        for x, y in zip(torch.autograd.grad((o * up).sum(), wrt), torch.autograd.grad((wanted * up).sum(), wrt)):
            textbook.close(x, y, "gradient", LIMITS[device][1])


@on_devices
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("mask", [None, "added", "truth"])
def test_a_cap_comes_before_what_is_added(softcap, mask, device):
    """As in FlexAttention in transformers: the softcap comes before an additive mask and the position bias."""
    q, k, v = operands(device)
    bias, numbers = (torch.randn(shape).to(device, DTYPES[device]) for shape in ((1, 4, 9, 9), (2, 1, 9, 9)))
    truth = ((torch.rand(2, 1, 9, 9) < 0.7) | torch.eye(9, dtype=torch.bool)).to(device)
    # cuDNN supports the gradient of a bias only if it is added to the score first.
    bias.requires_grad_(device == "cpu" or softcap is None)
    given = {"added": numbers, "truth": truth}.get(mask)
    o, _ = sdpa.transformers.attention(torch.nn.Module(), q, k, v, given, scaling=0.3, is_causal=False, softcap=softcap, position_bias=bias)

    def mod(s, b, h, i, j):
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        return s + bias + (numbers if mask == "added" else 0.0)

    wanted = textbook.attention(q, k, v, mod, (lambda b, h, i, j: given) if mask == "truth" else None, scale=0.3)[0].transpose(1, 2)
    textbook.close(o, wanted, "o", LIMITS[device][0])
    wrt = [q, k, v, *([bias] if bias.requires_grad else [])]
    up = torch.randn_like(o)
    for x, y in zip(torch.autograd.grad((o * up).sum(), wrt), torch.autograd.grad((wanted * up).sum(), wrt)):
        textbook.close(x, y, "gradient", LIMITS[device][1])


def test_an_executor_by_name():
    sdpa.transformers.register("rust_on_cpu", executor="cpu")
    sdpa.transformers.register("rust_on_cudnn", executor="cudnn")
    of, (ids, keep) = model("llama"), batch()
    logits = []
    for implementation in ("rust_attention", "rust_on_cpu"):
        of.set_attn_implementation(implementation)
        logits.append(of(ids, attention_mask=keep).logits)
    assert torch.equal(*logits)
    of.set_attn_implementation("rust_on_cudnn")
    with pytest.raises(sdpa.SpecError, match="executor: got cudnn, expected one that reads tensors in host memory: cpu"):
        of(ids, attention_mask=keep)
    with pytest.raises(sdpa.SpecError, match="executor: got 'abacus'"):
        sdpa.transformers.register(executor="abacus")


def test_what_is_not_covered_is_said():
    torch.manual_seed(3)
    with pytest.raises(sdpa.SpecError, match="name"):
        sdpa.transformers.register("rust_sdpa")
    assert transformers.__version__


@on_devices
def test_a_model_trains_with_dropout(device):
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, attention_dropout=0.5)).to(device)
    model.set_attn_implementation("rust_attention")
    ids = batch()[0].to(device)

    def step(seed):
        torch.manual_seed(seed)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    exact = model.eval(), step(0)
    (first, gradient), (again, same), (other, _) = model.train() and (step(1), step(1), step(2))
    assert first == again and torch.equal(gradient, same) and other != first
    assert first != exact[1][0] and gradient.abs().max() > 0
    assert abs(first - exact[1][0]) < 0.5  # Weights that are kept are scaled up.


@on_devices
def test_a_model_with_biases_of_positions(device):
    """T5: an encoder and a decoder, learned biases, cross attention."""
    # T5 does not scale its scores. With larger weights, gradients in 16 bits have no correct digit, in eager attention either.
    factor = 3.0 if device == "cpu" else 1.0
    small = {"vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "initializer_factor": factor}
    torch.manual_seed(3)
    of = T5ForConditionalGeneration(T5Config(**small, dropout_rate=0.0, decoder_start_token_id=0)).to(device, DTYPES[device]).train()
    (ids, keep), labels = batch(device=device), torch.randint(2, 97, (3, 7)).to(device)

    def run(of):
        for half in (of.encoder, of.decoder):
            half.set_attn_implementation(of.config._attn_implementation)
        of.zero_grad()
        result = of(input_ids=ids, attention_mask=keep, labels=labels)
        result.loss.backward()
        return {"logits": result.logits.detach()} | {n: p.grad.clone() for n, p in of.named_parameters() if p.grad is not None}

    given = of_each(of, run)
    assert not torch.equal(given[0]["logits"], given[1]["logits"]) and any("relative_attention_bias" in n for n in given[0])
    for n in given[0]:
        near(*(of[n] for of in given), n)


@on_devices
def test_checkpointed_layers(device):
    of = model("gemma2", device)
    of.set_attn_implementation("rust_attention")
    ids, keep = batch(device=device)
    _, wanted = train(of, ids, keep)
    of.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, ours = train(of, ids, keep)
    for n in wanted:
        textbook.close(ours[n], wanted[n], n, 1e-6 if device == "cpu" else 2e-2)


def _small(name):
    """A model with its default dropout, and a call that returns a loss."""
    ids = torch.randint(1, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    sound = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))
    if name == "GPT-2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=100, n_positions=64, n_embd=64, n_layer=2, n_head=4))
        return model, [model], lambda: model(input_ids=ids, labels=ids).loss
    if name == "BERT":
        sizes = dict(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
        model = transformers.BertModel(transformers.BertConfig(**sizes))
        return model, [model], lambda: model(input_ids=ids).last_hidden_state.square().mean()
    if name == "T5":
        config = transformers.T5Config(vocab_size=100, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
        model = transformers.T5ForConditionalGeneration(config)
        return model, [model.encoder, model.decoder], lambda: model(input_ids=ids, labels=ids).loss
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, conv_dim=(32,) * 7, mask_time_prob=0.0)
    model = transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**sizes, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4))
    return model, [model], lambda: model(sound).last_hidden_state.square().mean()


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "T5", "Wav2Vec2"])
def test_default_configurations_train(name):
    torch.manual_seed(5)
    model, parts, loss = _small(name)

    def step(seed):
        torch.manual_seed(seed)
        model.zero_grad()
        value = loss()
        value.backward()
        return value.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model.eval()
    exact = step(0)
    for part in parts:
        part.set_attn_implementation("rust_attention")
    ours = step(0)
    # Without dropout the results are those of eager attention.
    assert abs(exact[0] - ours[0]) < 1e-5 * max(1.0, abs(exact[0])) and exact[1].keys() == ours[1].keys()
    assert all((exact[1][p] - ours[1][p]).norm() <= 1e-4 * exact[1][p].norm() + 1e-7 for p in exact[1])
    model.train()
    first, again, other = step(1), step(1), step(2)
    assert first[0] == again[0] != other[0] and all(torch.equal(first[1][p], again[1][p]) for p in first[1])
    assert first[1].keys() == ours[1].keys()


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_gpt2_generates_with_each_cache(cache):
    torch.manual_seed(6)
    model, _, _ = _small("GPT-2")
    ids = torch.randint(1, 100, (2, 9))
    made = []
    for attention in ("eager", "rust_attention"):
        model.eval().set_attn_implementation(attention)
        made.append(model.generate(ids, max_new_tokens=12, do_sample=False, cache_implementation=cache, pad_token_id=0))
    assert torch.equal(*made)
