"""Serves random requests with a Llama of random weights, and prints tokens per second."""

from __future__ import annotations

import argparse
import random
import time

import torch

from . import static
from .cache import PagedCache
from .config import MODELS, Config, weights
from .decoder import Decoder
from .engine import Counts, Engine, Request
from .graphs import Graphs
from .sampler import Sampling


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Adds defaults to the help, except where it names them."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="serve", description=__doc__, formatter_class=Defaults)
    parser.add_argument("--model", choices=MODELS, default="small", help="extents of the model")
    parser.add_argument("--requests", type=int, default=32, help="number of requests")
    parser.add_argument("--prompt", type=int, default=60, help="most tokens of a prompt")
    parser.add_argument("--generate", type=int, default=40, help="most tokens to generate for a request")
    parser.add_argument("--budget", type=int, default=64, help="tokens of a step")
    parser.add_argument("--pages", type=int, default=128, help="pages of the KV cache")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for the most probable token")
    parser.add_argument("--top-p", type=float, default=1.0, help="probability of the tokens to sample from")
    parser.add_argument("--seed", type=int, default=1, help="seed of prompts and samples")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the model")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="element type (default: bfloat16 on CUDA, float32 on the CPU)")
    parser.add_argument("--threads", type=int, help="CPU threads; with few tokens, one is the fastest (default: PyTorch's number)")
    parser.add_argument("--no-graphs", action="store_true", help="run decode steps without CUDA graphs")
    parser.add_argument("--compare", action="store_true", help="also run transformers' generate with a static cache, which is greedy")
    parser.add_argument("--no-compile", action="store_true", help="run transformers without torch.compile, which needs a C compiler")
    parser.add_argument("--batch", type=int, default=32, help="requests of a batch of transformers' generate")
    given = parser.parse_args(arguments)
    for name in ("requests", "prompt", "generate", "batch", "threads"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            parser.error(f"--{name}: got {getattr(given, name)}, expected at least 1")
    if given.compare and given.temperature:
        parser.error("--compare: transformers draws other random numbers; leave out --temperature")
    return given


def requests(config: Config, sampling: Sampling, count: int, prompt: int = 60, generate: int = 40) -> list[Request]:
    """Returns requests with prompts and texts of different lengths."""
    numbers = random.Random(sampling.seed)
    made = []
    for n in range(count):
        tokens = [numbers.randrange(config.vocabulary) for _ in range(1 + numbers.randrange(prompt))]
        made.append(Request(tokens, 1 + numbers.randrange(generate), Sampling(sampling.temperature, sampling.top_p, sampling.seed + n)))
    return made


def serve(engine: Engine, submitted: list[Request]) -> tuple[list[list[int]], float]:
    """Returns the texts and the seconds."""
    engine.counts, engine.graphs.replayed = Counts(), 0
    for request in submitted:
        engine.submit(request)
    started = time.perf_counter()
    texts = engine.run()
    return texts, time.perf_counter() - started


def main(arguments: list[str] | None = None) -> None:
    given = options(arguments)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    dtype = getattr(torch, given.dtype or ("bfloat16" if given.device == "cuda" else "float32"))
    config = MODELS[given.model]
    random_weights = weights(config, 1, dtype, device)
    submitted = requests(config, Sampling(given.temperature, given.top_p, given.seed), given.requests, given.prompt, given.generate)
    cache = PagedCache(config, given.pages, given.page_size, dtype, device)
    engine = Engine(Decoder(config, random_weights), cache, given.budget, min(config.positions, given.prompt + given.generate - 1))
    engine.graphs = Graphs(device, not given.no_graphs)
    serve(engine, submitted)  # compiles kernels and captures graphs
    texts, seconds = serve(engine, submitted)
    counts = engine.counts
    for n, text in enumerate(texts[:4]):
        print(f"request {n}: {len(text)} tokens, {text[:8]}…")
    print(f"{len(texts)} requests in {counts.steps} steps, {counts.mixed} of them with decode and prefill, up to {counts.widest} requests in a step")
    if device.type == "cuda":
        print(f"{counts.replayed} steps replayed a CUDA graph")
    rate = counts.generated / seconds
    print(f"{counts.prefilled} tokens of prompts and {counts.generated} generated in {seconds:.2f} s: {rate:.0f} generated tokens/s")
    print(f"{cache.free_pages} of {cache.pages} pages are free")
    if given.compare:
        theirs, theirs_seconds = static.generate(static.load(config, random_weights), submitted, given.batch, not given.no_compile)
        equal = sum(a == b for ours, other in zip(texts, theirs) for a, b in zip(ours, other))
        other = counts.generated / theirs_seconds
        # A batch runs until its longest text ends.
        whole = -(-len(submitted) // given.batch) * given.batch * max(request.tokens for request in submitted) / theirs_seconds
        print(f"transformers, static cache, batches of {given.batch}: {other:.0f} generated tokens/s, or {whole:.0f} with those after the end of a text")
        print(f"sdpa is {rate / other:.2f}× as fast")
        print(f"{equal} of {counts.generated} tokens are equal")


if __name__ == "__main__":
    main()
