"""A serving loop: paged KV cache, continuous batching of chunked prefill and decode, CUDA graphs, sampling. `python -m serve --help` lists its options."""
