"""Continuous batching: each step decodes one token of every running request, and fills the rest of a token budget with chunks of prompts."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import torch

from .cache import PagedCache
from .decoder import Decoder
from .graphs import Graphs
from .sampler import Sampling, sample
from .step import Step


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    # Tokens to generate.
    tokens: int
    sampling: Sampling = Sampling()

    @property
    def length(self) -> int:
        """The tokens in the cache at the end. The model does not read the last token."""
        return len(self.prompt) + self.tokens - 1


@dataclass
class Running:
    number: int
    request: Request
    pages: list[int]
    # The prompt and the tokens that were generated.
    text: list[int]
    random: random.Random
    # Tokens in the cache.
    done: int = 0


@dataclass
class Counts:
    steps: int = 0
    # Steps with both decoding and a chunk of a prompt.
    mixed: int = 0
    prefilled: int = 0
    generated: int = 0
    # The most requests and the most tokens in one step.
    widest: int = 0
    largest: int = 0
    # Decode steps that replayed a CUDA graph.
    replayed: int = 0


@dataclass
class Engine:
    model: Decoder
    cache: PagedCache
    # The most tokens of a step.
    budget: int
    # The most tokens of a request; None for the positions of the model.
    longest: int | None = None
    waiting: deque = field(default_factory=deque)
    running: list[Running] = field(default_factory=list)
    submitted: int = 0
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        positions = self.model.config.positions
        self.longest = positions if self.longest is None else self.longest
        wrong = [f"budget: got {self.budget}, expected at least 1 token in a step"] if self.budget < 1 else []
        if not 1 <= self.longest <= positions:
            wrong.append(f"longest: got {self.longest}, expected between 1 and {positions}, the positions of the model")
        if wrong:
            raise ValueError("\n".join(wrong))
        self.device = self.model.embedding.device
        self.columns = self.cache.pages_for(self.longest)
        self.graphs = Graphs(self.device)
        self._steps: dict[tuple, Step] = {}

    def submit(self, request: Request) -> int:
        """Adds a request, which waits until enough pages are free for all of its tokens. Returns its number."""
        request.sampling.check()
        wrong, vocabulary = [], self.model.config.vocabulary
        if not request.prompt or request.tokens < 1:
            wrong.append(f"request: got {len(request.prompt)} tokens of a prompt and {request.tokens} to generate, expected at least 1 each")
        unknown = [token for token in request.prompt if not 0 <= token < vocabulary]
        if unknown:
            wrong.append(f"prompt: got the token {unknown[0]}, expected tokens from 0 to {vocabulary - 1}")
        if request.length > self.longest:
            wrong.append(f"request: got {request.length} tokens, expected at most {self.longest}; shorten the prompt, or raise the longest length")
        pages = self.cache.pages_for(request.length)
        if pages > self.cache.pages:
            wrong.append(f"request: got {request.length} tokens in {pages} pages, expected at most {self.cache.pages}, all pages of the cache; add pages")
        if wrong:
            raise ValueError("\n".join(wrong))
        self.waiting.append((self.submitted, request))
        self.submitted += 1
        return self.submitted - 1

    def _admit(self) -> None:
        """Starts requests in the order of submission. Each gets the pages for all of its tokens, so that none runs out of pages."""
        while self.waiting:
            number, request = self.waiting[0]
            pages = self.cache.pages_for(request.length)
            # A step decodes every running request, so there may not be more of them than the budget has tokens.
            if pages > self.cache.free_pages or len(self.running) >= self.budget:
                return
            self.waiting.popleft()
            self.running.append(Running(number, request, self.cache.allocate(pages), list(request.prompt), random.Random(request.sampling.seed)))

    def _chunks(self) -> list[tuple[Running, int]]:
        """Returns the requests of the next step with their numbers of tokens: decoding first, then chunks of prompts."""
        pending = [len(running.text) - running.done for running in self.running]
        left = self.budget - pending.count(1)
        chunks = []
        for running, tokens in zip(self.running, pending):
            chunk = 1 if tokens == 1 else min(tokens, left)
            left -= 0 if tokens == 1 else chunk
            if chunk:
                chunks.append((running, chunk))
        return chunks

    @torch.inference_mode()
    def step(self) -> list[tuple[int, list[int]]]:
        """Runs one step. Returns the number and the text of each request that it finished."""
        self._admit()
        chunks = self._chunks()
        if not chunks:
            if self.waiting:
                raise RuntimeError(f"pages: got {self.cache.free_pages} free ones of {self.cache.pages} while no request runs, expected all; release them")
            return []
        # A request whose prompt goes on is not sampled, and draws no number.
        sampled = [running.done + tokens == len(running.text) for running, tokens in chunks]
        rows = [self._row(running, tokens, last) for (running, tokens), last in zip(chunks, sampled)]
        greedy = all(running.request.sampling.temperature == 0 for running, _ in chunks)
        step = self._described(rows)
        self._count(chunks)
        tokens = self.graphs.run(self._key(step, greedy), lambda: self._forward(step, greedy)).tolist()
        self.counts.replayed = self.graphs.replayed
        for (running, chunk), last, token in zip(chunks, sampled, tokens):
            running.done += chunk
            if last:
                if token < 0:
                    raise RuntimeError(f"request {running.number}: the logits of token {running.done} are NaN")
                running.text.append(token)
                self.counts.generated += 1
        return self._finish()

    def _row(self, running: Running, tokens: int, last: bool) -> tuple:
        start, sampling = running.done, running.request.sampling
        slots = [self.cache.slot(running.pages, position) for position in range(start, start + tokens)]
        draw = running.random.random() if last and sampling.temperature else 0.0
        return running.text[start : start + tokens], start, slots, running.pages, (sampling.temperature, sampling.top_p, draw)

    def _described(self, rows: list) -> Step:
        """Returns the tensors of a step. Extents are rounded up, so that steps share them, plans and CUDA graphs."""
        longest = max(len(row[0]) for row in rows)
        sequences = bucket(len(rows))
        tokens = sequences if longest == 1 else bucket(sum(len(row[0]) for row in rows))
        extents = tokens, sequences, 1 if longest == 1 else max(16, 1 << (longest - 1).bit_length())
        if extents not in self._steps:
            self._steps[extents] = Step(*extents[:2], self.columns, extents[2], self.device)
        step = self._steps[extents]
        step.fill(rows, self.cache.unused_slot)
        return step

    def _key(self, step: Step, greedy: bool) -> tuple | None:
        """Returns the key of a decode step's CUDA graph; None for other steps."""
        return (step.sequences, greedy) if step.longest == 1 else None

    def _forward(self, step: Step, greedy: bool) -> torch.Tensor:
        x = self.model.forward(step.ids, step.positions, lambda layer, q, k, v: self.cache.attend(layer, step, q, k, v))
        # Each sequence's last token has logits, though those in the middle of a prompt are not sampled: extents vary less.
        return sample(self.model.logits(x[step.last]), step.temperature, step.top_p, step.draw, greedy)

    def _count(self, chunks: list) -> None:
        prompts = [tokens for running, tokens in chunks if running.done < len(running.request.prompt)]
        self.counts.steps += 1
        self.counts.mixed += 0 < len(prompts) < len(chunks)
        self.counts.prefilled += sum(prompts)
        self.counts.widest = max(self.counts.widest, len(chunks))
        self.counts.largest = max(self.counts.largest, sum(tokens for _, tokens in chunks))

    def _finish(self) -> list[tuple[int, list[int]]]:
        done = lambda running: len(running.text) == len(running.request.prompt) + running.request.tokens  # noqa: E731
        finished = [running for running in self.running if done(running)]
        self.running = [running for running in self.running if not done(running)]
        for running in finished:
            self.cache.release(running.pages)
        return [(running.number, running.text[len(running.request.prompt) :]) for running in finished]

    def run(self) -> list[list[int]]:
        """Runs until no request is left. Returns the texts in the order of submission."""
        texts = []
        while self.running or self.waiting:
            texts += self.step()
        return [text for _, text in sorted(texts)]


def bucket(n: int) -> int:
    """Rounds up to a power of two, or above 8 to a multiple of 8."""
    return 1 << (n - 1).bit_length() if n <= 8 else -(-n // 8) * 8
