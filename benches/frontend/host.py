"""Host time of a call beside `device host`: NVIDIA's frontend in Python, and PyTorch, for causal (1,32,8,8,8,128) in bf16.

python3 host.py; nvidia-cudnn-frontend must be there for its row, and reads the cuDNN that PyTorch has loaded."""
import time
import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

BATCH, ROUNDS = 100, 200


def least(call):
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(BATCH):
            call()
        best = min(best, time.perf_counter() - start)
        torch.cuda.synchronize()
    return best * 1e6 / BATCH


def row(what, call):
    try:
        call()
        torch.cuda.synchronize()
        print(f"    {least(call):8.3f}  {what}")
    except Exception as e:  # told, not hidden
        print(f"    absent    {what}: {type(e).__name__}: {str(e).splitlines()[0]}")


def frontend(q, k, v, o):
    import cudnn

    kind = cudnn.data_type
    graph = cudnn.pygraph(io_data_type=kind.BFLOAT16, intermediate_data_type=kind.FLOAT, compute_data_type=kind.FLOAT)
    tensors = [graph.tensor_like(t) for t in (q, k, v)]
    result, _ = graph.sdpa(*tensors, is_inference=True, attn_scale=q.shape[-1] ** -0.5, use_causal_mask=True)
    result.set_output(True).set_dim(o.shape).set_stride(o.stride())
    graph.build([cudnn.heur_mode.A])
    workspace = torch.empty(max(graph.get_workspace_size(), 1), device="cuda", dtype=torch.uint8)
    pack = dict(zip([*tensors, result], (q, k, v, o)))
    print(f"    frontend {cudnn.__version__} on cuDNN {cudnn.backend_version()}")
    return lambda: graph.execute(pack, workspace)


def main():
    torch.manual_seed(1)
    q = torch.randn(1, 32, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 8, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    print(f"microseconds per call, least of {ROUNDS} batches of {BATCH}; PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    try:
        row("frontend, Python execute", frontend(q, k, v, torch.empty_like(q)))
    except Exception as e:
        print(f"    absent    frontend, Python: {type(e).__name__}: {e}")
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with torch.no_grad(), sdpa_kernel(backend):
            row(f"PyTorch, {backend.name}", lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


if __name__ == "__main__":
    main()
