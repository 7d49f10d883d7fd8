"""run_gym.py FOLDER [cpu|cuda]: runs every mask and score_mod of attention-gym, a clone of which FOLDER has, through `sdpa.flex_attention`.

Output and gradients are compared with attention in f64 over FlexAttention's own evaluation of the functions. Prints a line for each, and fails if any differs.
"""

import sys
import traceback

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention import flex_attention as theirs

import sdpa

TOLERANCE = {"cpu": (torch.float32, 2e-5), "cuda": (torch.bfloat16, 3e-2)}


def masks(gym, device):
    """Names, mask_mods and numbers of queries and keys."""
    ints = lambda *x: torch.tensor(x, device=device, dtype=torch.int32)  # noqa: E731
    m = gym.masks
    offsets = ints(0, 50, 128, 192, 256)
    parents = [-1, 0, 0, 1, 1, 2]
    tiles = torch.rand(2, 4, 8, 8, device=device).topk(3, -1).indices.to(torch.int32)
    yield "causal", m.causal_mask, 256, 256
    yield "sliding window", m.generate_sliding_window(30), 256, 256
    yield "dilated window", m.generate_dilated_sliding_window(60, 4), 256, 256
    yield "global window", m.generate_global_sliding_window(20, torch.rand(256, device=device) < 0.05), 256, 256
    yield "prefix LM", m.generate_prefix_lm_mask(77), 256, 256
    yield "documents", m.generate_doc_mask_mod(m.causal_mask, offsets), 256, 256
    yield "packed causal documents", m.generate_packed_causal_doc_mask_mod(offsets), 256, 256
    yield "shared prefix", m.generate_shared_prefix_mask_mod(offsets, ints(0, 0, 2, 2)), 256, 256
    yield "batchify", m.batchify_mask_mod(m.causal_mask, 48), 256, 256
    yield "block diffusion", m.generate_block_diffusion_mask(128, 16), 256, 256
    yield "flamingo", m.generate_vision_cross_attention_mask_mod(ints([0, 40], [20, 100], [90, 256]), 30), 256, 90
    yield "tree", m.generate_jetspec_tree_causal_mask_mod(100, m.build_tree_ancestor_matrix(parents, device=device)), 6, 106
    yield "sampled blocks", m.generate_jetspec_training_mask_mod(64, 16), 192, 256
    yield "NATTEN", m.generate_natten(16, 16, 5, 7), 256, 256
    yield "tiled NATTEN", m.generate_tiled_natten(16, 16, 5, 5, 4, 4), 256, 256
    yield "Morton NATTEN", m.generate_morton_natten(16, 16, 5, 5), 256, 256
    yield "STA 2D", m.generate_sta_mask_mod_2d((16, 16), (8, 8), (4, 4)), 256, 256
    yield "STA 3D", m.generate_sta_mask_mod_3d((4, 8, 8), (2, 4, 4), (2, 4, 4)), 256, 256
    yield "SVG spatial", m.generate_spatial_head_mask_mod(16, 4, 60, 2), 256, 256
    yield "SVG temporal", m.generate_temporal_head_mask_mod(16, 4, 60, 2), 256, 256
    yield "VSA", m.generate_vsa_mask_mod(tiles, 32), 256, 256
    yield "VSA block map", gym.masks.vsa.generate_vsa_block_map_mask_mod(torch.rand(2, 4, 8, 8, device=device) < 0.5, 32), 256, 256
    yield "VSA padding", gym.masks.vsa.generate_vsa_padding_mask_mod(ints(32, 30, 32, 5, 32, 1, 32, 32), 32), 256, 256


def mods(gym, device):
    """Names, score_mods, the tensors that learn, and for a function that `over` cannot differentiate the same in f64 over all scores."""
    import torch.nn.functional as F

    m = gym.mods
    learns = lambda *shape: torch.randn(shape, device=device, requires_grad=True)  # noqa: E731
    spatial = learns(4, 6)
    distances = torch.randint(0, 6, (2, 256, 256), device=device, dtype=torch.int32)
    rope = learns(2, 4, 256, 8), learns(2, 1, 256, 8)
    yield "ALiBi", m.generate_alibi_bias(4), (), None
    yield "tanh softcap", m.generate_tanh_softcap(20, approx=False), (), None
    for activation in (F.gelu, F.silu, F.relu, F.softplus, torch.sigmoid):
        yield f"activation {activation.__name__}", m.activation.generate_activation_score_mod(activation), (), None
    yield "Graphormer", m.graphormer.generate_graphormer_spatial_bias(spatial, distances), (spatial,), None
    yield "sandwich", m.sandwich.generate_sandwich_bias(4, 256, device=device), (), None
    yield "MLA rope", m.latent_attention.generate_mla_rope_score_mod(*rope, 4), rope, lambda scores: scores + rope[0].double() @ rope[1].double().transpose(-1, -2)


def over(function, tensors, *indices):
    """Evaluates a score_mod or mask_mod over all indices, as FlexAttention does."""
    scored = len(tensors)
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, (0,) * scored + dims)
    with TransformGetItemToIndex():
        return function(*tensors, *indices)


def compare(mod, mask, learned, exact_mod, queries, keys, device):
    dtype, tolerance = TOLERANCE[device]
    q, k, v = (torch.randn(2, 4, n, 32, device=device, dtype=dtype, requires_grad=True) for n in (queries, keys, keys))
    at = [torch.arange(n, device=device) for n in (2, 4, queries, keys)]
    e = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = e[0] @ e[1].transpose(-1, -2) / 32**0.5
    if exact_mod is not None:
        scores = exact_mod(scores)
    elif mod is not None:
        scores = over(mod, (scores,), *at)
    if mask is not None:
        scores = scores.masked_fill(~over(mask, (), *at), -torch.inf)
    right = torch.softmax(scores, -1).nan_to_num() @ e[2]
    o = sdpa.flex_attention(q, k, v, mod, None if mask is None else sdpa.create_block_mask(mask, 2, 4, queries, keys, device=device))
    d_o = torch.randn_like(o)
    made = (o, *torch.autograd.grad(o, (q, k, v, *learned), d_o))
    exact = (right, *torch.autograd.grad(right, (*e, *learned), d_o.double()))
    return max(((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-30)).item() / tolerance for x, y in zip(made, exact))


def main(folder, device="cpu"):
    sys.path.insert(0, folder)
    import attn_gym.masks.vsa
    import attn_gym.mods.activation
    import attn_gym.mods.graphormer
    import attn_gym.mods.latent_attention
    import attn_gym.mods.sandwich
    import attn_gym as gym

    torch.manual_seed(0)
    rows = [(name, None, mask, (), None, q, k) for name, mask, q, k in masks(gym, device)]
    rows += [(name, mod, None, learned, exact, 256, 256) for name, mod, learned, exact in mods(gym, device)]
    wrong = 0
    for name, mod, mask, *more in rows:
        try:
            error = compare(mod, mask, *more, device)
            verdict = "right" if error <= 1 else "WRONG"
            print(f"{verdict} {name}: {error:.2f} of the tolerance", flush=True)
        except Exception as e:  # noqa: BLE001 - every function is tried
            verdict = "UNSUPPORTED"
            print(f"{verdict} {name}: {type(e).__name__}: {str(e)[:300]}", flush=True)
            if not isinstance(e, (sdpa.UnsupportedError, sdpa.SpecError, sdpa.TracingError)):
                traceback.print_exc(limit=-2)
        wrong += verdict != "right"
    print(f"{len(rows) - wrong} of {len(rows)} right on {device}")
    return wrong


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]) != 0)
