//! Continuous batching: each step decodes one token of every running request, and fills the rest of a token budget with chunks of prompts.

use crate::decoder::Decoder;
use crate::sampler::{Sampler, Sampling};
use candle_core::{DType, Device, Result, Tensor, bail};
use sdpa_candle::{PagedKvCache, PagedShape, SequenceId};
use std::collections::VecDeque;

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) prompt: Vec<u32>,
    /// Tokens to generate.
    pub(crate) tokens: usize,
    pub(crate) sampling: Sampling,
}

impl Request {
    /// Returns the number of tokens in the cache at the end. The last token is not read by the model.
    fn length(&self) -> usize {
        self.prompt.len() + self.tokens - 1
    }
}

/// The text of a request: its number, in the order of submission, and the tokens that were generated.
pub(crate) type Text = (usize, Vec<u32>);

#[derive(Debug)]
struct Running {
    number: usize,
    request: Request,
    id: SequenceId,
    sampler: Sampler,
    /// The prompt and the tokens that were generated.
    text: Vec<u32>,
    /// Tokens in the cache.
    done: usize,
}

/// Counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) steps: usize,
    /// Steps with both decoding and a chunk of a prompt.
    pub(crate) mixed: usize,
    pub(crate) prefilled: usize,
    pub(crate) generated: usize,
    /// The most requests in one step.
    pub(crate) widest: usize,
}

pub(crate) struct Engine<'a> {
    model: &'a Decoder,
    device: Device,
    cache: PagedKvCache,
    /// The most tokens of a step.
    budget: usize,
    waiting: VecDeque<(usize, Request)>,
    running: Vec<Running>,
    submitted: usize,
    pub(crate) counts: Counts,
}

impl<'a> Engine<'a> {
    pub(crate) fn new(
        model: &'a Decoder,
        [pages, page_size]: [usize; 2],
        budget: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Engine<'a>> {
        if budget == 0 {
            bail!("budget: got 0, expected at least 1 token in a step");
        }
        let config = model.config();
        let shape =
            PagedShape { layers: config.layers, pages, page_size, heads_kv: config.heads_kv, dim_qk: config.dim, dim_v: config.dim };
        let cache = PagedKvCache::new(shape, dtype, device)?;
        let device = device.clone();
        Ok(Engine { model, device, cache, budget, waiting: VecDeque::new(), running: Vec::new(), submitted: 0, counts: Counts::default() })
    }

    fn pages(&self, request: &Request) -> usize {
        request.length().div_ceil(self.cache.shape().page_size)
    }

    pub(crate) fn free_pages(&self) -> usize {
        self.cache.free_pages()
    }

    /// Adds a request, which waits until enough pages are free for all of its tokens. Returns its number.
    pub(crate) fn submit(&mut self, request: Request) -> Result<usize> {
        let (vocabulary, positions) = (self.model.config().vocabulary, self.model.config().positions);
        request.sampling.check()?;
        if request.prompt.is_empty() || request.tokens == 0 {
            bail!("request: got {} tokens of a prompt and {} to generate, expected at least 1 each", request.prompt.len(), request.tokens);
        }
        if let Some(token) = request.prompt.iter().find(|token| **token as usize >= vocabulary) {
            bail!("prompt: got the token {token}, expected tokens below {vocabulary}");
        }
        if request.length() > positions {
            bail!("request: got {} tokens, expected at most {positions}, the positions of the model; shorten the prompt", request.length());
        }
        let (needed, all) = (self.pages(&request), self.cache.shape().pages);
        if needed > all {
            bail!("request: got {} tokens in {needed} pages, expected at most {all}, all pages of the cache; add pages", request.length());
        }
        self.waiting.push_back((self.submitted, request));
        self.submitted += 1;
        Ok(self.submitted - 1)
    }

    /// Starts requests in the order of submission, as long as the pages for all of their tokens are left. So no request runs out of pages.
    fn admit(&mut self) {
        let mut left = self.cache.shape().pages - self.running.iter().map(|running| self.pages(&running.request)).sum::<usize>();
        while let Some((_, request)) = self.waiting.front() {
            let needed = self.pages(request);
            // A step decodes every running request, so there may not be more of them than the budget has tokens.
            if needed > left || self.running.len() >= self.budget {
                break;
            }
            let Some((number, request)) = self.waiting.pop_front() else { break };
            left -= needed;
            let (sampler, text) = (Sampler::new(request.sampling), request.prompt.clone());
            self.running.push(Running { number, request, id: self.cache.open(), sampler, text, done: 0 });
        }
    }

    /// Returns the number of tokens of each running request in the next step: decoding first, then chunks of prompts.
    fn plan(&self) -> Vec<usize> {
        let pending: Vec<usize> = self.running.iter().map(|running| running.text.len() - running.done).collect();
        let mut left = self.budget - pending.iter().filter(|pending| **pending == 1).count();
        let chunks = pending.into_iter().map(|pending| {
            if pending == 1 {
                return 1;
            }
            let chunk = pending.min(left);
            left -= chunk;
            chunk
        });
        chunks.collect()
    }

    /// Runs one step. Returns the requests that it finished.
    pub(crate) fn step(&mut self) -> Result<Vec<Text>> {
        self.admit();
        let plan = self.plan();
        let active: Vec<(usize, usize)> = plan.into_iter().enumerate().filter(|(_, tokens)| *tokens > 0).collect();
        if active.is_empty() {
            return Ok(Vec::new());
        }
        let new: Vec<(SequenceId, usize)> = active.iter().map(|(n, tokens)| (self.running[*n].id, *tokens)).collect();
        let ids: Vec<u32> =
            active.iter().flat_map(|(n, tokens)| self.running[*n].text[self.running[*n].done..][..*tokens].iter().copied()).collect();
        let step = self.cache.step(&new)?;
        let x = self.model.forward(&Tensor::new(ids, &self.device)?, step.positions(), &mut |layer, attention, [q, k, v]| {
            self.cache.attend(layer, &step, attention, q, k, v)
        })?;
        // Every sequence's last token has logits, though those in the middle of a prompt are not sampled: extents vary less.
        let logits = self.model.logits(&x.index_select(step.last(), 0)?)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
        self.count(&active);
        for ((n, tokens), logits) in active.iter().zip(&logits) {
            let running = &mut self.running[*n];
            running.done += tokens;
            if running.done == running.text.len() {
                running.text.push(running.sampler.sample(logits)?);
                self.counts.generated += 1;
            }
        }
        self.finish()
    }

    fn count(&mut self, active: &[(usize, usize)]) {
        let is_prompt = |&(n, _): &(usize, usize)| self.running[n].done < self.running[n].request.prompt.len();
        let prompts: Vec<&(usize, usize)> = active.iter().filter(|active| is_prompt(active)).collect();
        self.counts.steps += 1;
        self.counts.mixed += usize::from(!prompts.is_empty() && prompts.len() < active.len());
        self.counts.prefilled += prompts.iter().map(|(_, tokens)| tokens).sum::<usize>();
        self.counts.widest = self.counts.widest.max(active.len());
    }

    fn finish(&mut self) -> Result<Vec<Text>> {
        let mut finished = Vec::new();
        for n in (0..self.running.len()).rev() {
            let Running { request, text, .. } = &self.running[n];
            if text.len() == request.prompt.len() + request.tokens {
                let mut running = self.running.remove(n);
                self.cache.close(running.id)?;
                finished.push((running.number, running.text.split_off(running.request.prompt.len())));
            }
        }
        finished.reverse();
        Ok(finished)
    }

    /// Runs until no request is left. Returns the texts in the order of submission.
    pub(crate) fn run(&mut self) -> Result<Vec<Vec<u32>>> {
        let mut texts = Vec::new();
        while !self.running.is_empty() || !self.waiting.is_empty() {
            texts.extend(self.step()?);
        }
        texts.sort_by_key(|(number, _)| *number);
        Ok(texts.into_iter().map(|(_, text)| text).collect())
    }
}
