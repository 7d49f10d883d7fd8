//! The texts of batched requests against those of each request alone, and the sampler against its distribution.

use crate::config::{Config, Family};
use crate::decoder::Decoder;
use crate::engine::{Counts, Engine, Request};
use crate::sampler::{Sampler, Sampling};
use crate::weights::Random;
use crate::{load, requests};
use candle_core::{DType, Device, Tensor};
use sdpa_candle::Documents;

fn model(family: Family) -> Decoder {
    load(&Config::small(family), 1, DType::F32, &Device::Cpu).unwrap()
}

fn engine<'a>(model: &'a Decoder, pages: usize, budget: usize) -> Engine<'a> {
    Engine::new(model, [pages, 4], budget, DType::F32, &Device::Cpu).unwrap()
}

/// Generates without a cache: the whole text is computed anew for each token.
fn alone(model: &Decoder, request: &Request) -> Vec<u32> {
    let (mut text, mut sampler) = (request.prompt.clone(), Sampler::new(request.sampling));
    for _ in 0..request.tokens {
        let documents = Documents::new(&Tensor::new(&[0, text.len() as u32], &Device::Cpu).unwrap(), text.len());
        let positions = Tensor::arange(0, text.len() as u32, &Device::Cpu).unwrap();
        let ids = Tensor::new(text.clone(), &Device::Cpu).unwrap();
        let x = model.forward(&ids, &positions, &mut |_, attention, [q, k, v]| attention.forward_packed(&documents, q, k, v)).unwrap();
        let logits = model.logits(&x.narrow(0, text.len() - 1, 1).unwrap()).unwrap().to_vec2::<f32>().unwrap();
        text.push(sampler.sample(&logits[0]).unwrap());
    }
    text.split_off(request.prompt.len())
}

#[test]
fn batched_requests_have_the_text_of_each_alone() {
    for (family, sampling) in [
        (Family::Llama, Sampling::GREEDY),
        (Family::Gemma3, Sampling { temperature: 0.5, top_p: 0.9, seed: 3 }),
        (Family::Qwen3, Sampling { temperature: 1., top_p: 1., seed: 4 }),
    ] {
        let model = model(family);
        let requests = requests(model.config(), sampling, 6);
        let want: Vec<Vec<u32>> = requests.iter().map(|request| alone(&model, request)).collect();
        // A large budget, a small one that cuts prompts into chunks, and a cache that lets some requests wait.
        for (pages, budget) in [(400, 512), (400, 7), (24, 16)] {
            let mut engine = engine(&model, pages, budget);
            for request in &requests {
                engine.submit(request.clone()).unwrap();
            }
            let texts = engine.run().unwrap();
            assert_eq!(texts, want, "{family:?} {pages} {budget}");
            assert_eq!(engine.free_pages(), pages, "all pages are returned");
            let Counts { prefilled, generated, mixed, widest, .. } = engine.counts;
            assert_eq!(prefilled, requests.iter().map(|request| request.prompt.len()).sum::<usize>());
            assert_eq!(generated, requests.iter().map(|request| request.tokens).sum::<usize>());
            assert!(budget == 512 || mixed > 0, "{pages} {budget}: no step had decode and prefill");
            assert!(widest > 1);
        }
    }
}

#[test]
fn requests_that_arrive_later_join_the_batch() {
    let model = model(Family::Llama);
    let requests = requests(model.config(), Sampling::GREEDY, 6);
    let mut engine = engine(&model, 400, 32);
    let mut texts = Vec::new();
    for request in &requests {
        engine.submit(request.clone()).unwrap();
        texts.extend(engine.step().unwrap());
    }
    let early = texts.len();
    // More steps than all requests have tokens.
    for _ in 0..600 {
        texts.extend(engine.step().unwrap());
    }
    assert!(early < requests.len() && engine.free_pages() == 400, "{early} finished, {} pages are free", engine.free_pages());
    texts.sort_by_key(|(number, _)| *number);
    let want: Vec<Vec<u32>> = requests.iter().map(|request| alone(&model, request)).collect();
    assert_eq!(texts.into_iter().map(|(_, text)| text).collect::<Vec<_>>(), want);
}

#[test]
fn requests_that_cannot_run_are_refused() {
    let model = model(Family::Llama);
    let mut engine = engine(&model, 10, 8);
    let mut told = |prompt: Vec<u32>, tokens: usize, sampling: Sampling, part: &str| {
        let error = engine.submit(Request { prompt, tokens, sampling }).unwrap_err().to_string();
        assert!(error.contains(part), "{part} is not in: {error}");
    };
    told(vec![1; 40], 2, Sampling::GREEDY, "got 41 tokens in 11 pages, expected at most 10, all pages of the cache");
    told(vec![1; 100], 40, Sampling::GREEDY, "got 139 tokens, expected at most 128, the positions of the model");
    told(vec![], 2, Sampling::GREEDY, "got 0 tokens of a prompt");
    told(vec![1], 0, Sampling::GREEDY, "0 to generate");
    told(vec![1, 96], 2, Sampling::GREEDY, "got the token 96, expected tokens below 96");
    told(vec![1], 2, Sampling { temperature: -1., ..Sampling::GREEDY }, "temperature: got -1");
    told(vec![1], 2, Sampling { top_p: 0., ..Sampling::GREEDY }, "top_p: got 0");
    // The longest request that fits.
    engine.submit(Request { prompt: vec![1; 40], tokens: 1, sampling: Sampling::GREEDY }).unwrap();
    assert_eq!(engine.run().unwrap().len(), 1);
    assert!(crate::options(["--pages", "x"].map(String::from).into_iter()).is_err());
    assert!(Engine::new(&model, [1, 1], 0, DType::F32, &Device::Cpu).is_err());
}

#[test]
fn samples_have_the_probabilities_of_the_nucleus() {
    // Probabilities of 8, 4, 2 and 1 fifteenths.
    let logits = [2f32, 8., 1., 4.].map(f32::ln);
    let shares = |temperature: f32, top_p: f32| {
        let mut sampler = Sampler::new(Sampling { temperature, top_p, seed: 5 });
        let mut counts = [0f64; 4];
        for _ in 0..20_000 {
            counts[sampler.sample(&logits).unwrap() as usize] += 1. / 20_000.;
        }
        counts
    };
    let close = |got: [f64; 4], want: [f64; 4]| {
        assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 0.015 && (b > 0. || *a == 0.)), "{got:?} {want:?}");
    };
    close(shares(1., 1.), [2. / 15., 8. / 15., 1. / 15., 4. / 15.]);
    // A temperature of 1/2 squares the probabilities.
    close(shares(0.5, 1.), [4. / 85., 64. / 85., 1. / 85., 16. / 85.]);
    // The two most probable tokens reach 0.7; the first one alone reaches 0.5.
    close(shares(1., 0.7), [0., 8. / 12., 0., 4. / 12.]);
    close(shares(1., 0.5), [0., 1., 0., 0.]);
    assert_eq!(Sampler::new(Sampling::GREEDY).sample(&logits).unwrap(), 1);
    assert!(Sampler::new(Sampling::GREEDY).sample(&[1., f32::NAN]).is_err());
    let text = |seed: u64| {
        let mut sampler = Sampler::new(Sampling { temperature: 1., top_p: 1., seed });
        (0..20).map(|_| sampler.sample(&logits).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(text(6), text(6));
    assert_ne!(text(6), text(7));
    assert!((0..1000).all(|_| Random::new(8).below(3) < 3));
}
