//! KV caches: attention over what they return, against the textbook over all tokens at once.

use crate::errors::told;
use crate::textbook::{CPU, Random, Textbook, close, keep, wide};
use candle_core::{DType, Result, Tensor, Var};
use sdpa_candle::{Attention, KvCache, Mask, PagedKvCache, PagedShape, SequenceId};
use std::collections::BTreeMap;

fn same(scores: &Tensor) -> Result<Tensor> {
    Ok(scores.clone())
}

/// Causal attention of (batch, heads, seq, dim) in f64.
fn textbook([q, k, v]: [&Tensor; 3]) -> Tensor {
    let seq = q.dim(2).unwrap();
    let kept = keep(seq, seq, |q, k| k <= q);
    let textbook = Textbook { scale: 1. / 8f64.sqrt(), scores: &same, keep: &kept, sink: None, dropped: None };
    let [q, k, v] = [q, k, v].map(wide);
    textbook.attend(&q, &k, &v).unwrap().0
}

#[test]
fn chunks_that_are_appended_are_attended_as_one_sequence() {
    let mut random = Random::new(51);
    let mut cache = KvCache::new(11);
    for round in 0..2 {
        let (q, k, v) = (random.tensor(&[2, 4, 11, 8]), random.tensor(&[2, 2, 11, 8]), random.tensor(&[2, 2, 11, 5]));
        let want = textbook([&q, &k, &v]);
        let mut at = 0;
        for tokens in [4, 1, 0, 5, 1] {
            let from = at;
            let part = |x: &Tensor| x.narrow(2, from, tokens).unwrap();
            let (keys, values) = cache.append(&part(&k), &part(&v)).unwrap();
            at += tokens;
            assert_eq!((cache.len(), cache.is_empty(), keys.dim(2).unwrap()), (at, false, at));
            if tokens > 0 {
                let o = Attention::new().mask(Mask::causal_bottom_right()).forward(&part(&q), &keys, &values).unwrap();
                close(&format!("round {round}, {at} tokens"), &o, &want.narrow(2, at - tokens, tokens).unwrap(), 1e-5);
            }
        }
        cache.reset();
        assert!(cache.is_empty());
    }
}

#[test]
fn a_contiguous_cache_refuses_wrong_tokens_and_stays_unchanged() {
    let mut random = Random::new(52);
    let mut cache = KvCache::new(4);
    let x = random.tensor(&[1, 2, 3, 8]);
    cache.append(&x, &x).unwrap();
    told(
        cache.append(&random.var(&[1, 2, 1, 8]), &random.var(&[1, 2, 1, 8])),
        &["k: got a tensor that requires a gradient", "v: got a tensor"],
    );
    told(cache.append(&x, &x), &["tokens in the cache: got 6, expected at most 4, the capacity of the cache"]);
    let half = random.tensor(&[1, 3, 1, 8]).to_dtype(DType::F16).unwrap();
    told(
        cache.append(&half, &half.narrow(1, 0, 2).unwrap()),
        &[
            "k shape: got [1, 3, 1, 8], expected [1, 2, tokens, 8]",
            "k dtype: got f16, expected f32",
            "v dtype",
            "v shape: got [1, 2, 1, 8], expected [1, 3, 1]",
        ],
    );
    told(cache.append(&x.flatten_to(1).unwrap(), &x), &["k shape: got [2, 3, 8], expected (batch, head, seq, dim)"]);
    told(KvCache::new(4).append(&x.to_dtype(DType::U32).unwrap(), &x), &["k dtype: got u32, expected one of f32, f16, bf16"]);
    assert_eq!(cache.len(), 3);
    let (k, _) = cache.append(&x.narrow(2, 0, 1).unwrap(), &x.narrow(2, 0, 1).unwrap()).unwrap();
    close("kept", &k.narrow(2, 0, 3).unwrap(), &x, 0.);
}

const SHAPE: PagedShape = PagedShape { layers: 2, pages: 10, page_size: 4, heads_kv: 2, dim_qk: 8, dim_v: 5 };

/// The tokens of a request in both layers: (1, heads, tokens, dim).
type Request = [[Tensor; 3]; 2];

fn request(random: &mut Random, tokens: usize) -> Request {
    [(); 2].map(|()| [[1, 4, tokens, 8], [1, 2, tokens, 8], [1, 2, tokens, 5]].map(|dims| random.tensor(&dims)))
}

/// Runs a step of these sequences, and compares it with the textbook over each sequence alone.
fn run(cache: &mut PagedKvCache, requests: &BTreeMap<SequenceId, Request>, new: &[(SequenceId, usize)]) {
    let before: Vec<usize> = new.iter().map(|(id, _)| cache.len(*id).unwrap()).collect();
    let step = cache.step(new).unwrap();
    assert_eq!(step.tokens(), new.iter().map(|(_, tokens)| tokens).sum::<usize>());
    let positions: Vec<u32> = new.iter().zip(&before).flat_map(|((_, n), at)| *at as u32..(at + n) as u32).collect();
    assert_eq!(step.positions().to_vec1::<u32>().unwrap(), positions);
    let ends = new.iter().scan(0, |end, (_, n)| {
        *end += *n as u32;
        Some(*end - 1)
    });
    assert_eq!(step.last().to_vec1::<u32>().unwrap(), ends.collect::<Vec<_>>());
    for layer in [0, 1] {
        let packed = |operand: usize| {
            let parts: Vec<Tensor> = new
                .iter()
                .zip(&before)
                .map(|((id, n), at)| requests[id][layer][operand].squeeze(0).unwrap().narrow(1, *at, *n).unwrap().transpose(0, 1).unwrap())
                .collect();
            Tensor::cat(&parts, 0).unwrap()
        };
        let o = cache.attend(layer, &step, &Attention::new().mask(Mask::causal_ends()), &packed(0), &packed(1), &packed(2)).unwrap();
        let mut row = 0;
        for ((id, n), at) in new.iter().zip(&before) {
            let [q, k, v] = &requests[id][layer];
            let want = textbook([q, k, v]).squeeze(0).unwrap().narrow(1, *at, *n).unwrap().transpose(0, 1).unwrap();
            close(&format!("{id:?} at {at}, layer {layer}"), &o.narrow(0, row, *n).unwrap(), &want, 1e-5);
            row += n;
        }
    }
}

#[test]
fn sequences_share_pools_and_reuse_pages() {
    let mut random = Random::new(53);
    let mut cache = PagedKvCache::new(SHAPE, DType::F32, &CPU).unwrap();
    let mut requests = BTreeMap::new();
    let mut open = |cache: &mut PagedKvCache, requests: &mut BTreeMap<SequenceId, Request>| {
        let id = cache.open();
        requests.insert(id, request(&mut random, 20));
        id
    };
    let (a, b) = (open(&mut cache, &mut requests), open(&mut cache, &mut requests));
    run(&mut cache, &requests, &[(a, 6)]);
    run(&mut cache, &requests, &[(b, 3), (a, 1)]);
    assert_eq!((cache.free_pages(), cache.len(a), cache.len(b)), (7, Some(7), Some(3)));
    let c = open(&mut cache, &mut requests);
    run(&mut cache, &requests, &[(a, 1), (b, 1), (c, 9)]);
    cache.close(a).unwrap();
    assert_eq!((cache.free_pages(), cache.len(a)), (6, None));
    let d = open(&mut cache, &mut requests);
    run(&mut cache, &requests, &[(d, 11), (b, 5), (c, 1)]);
    run(&mut cache, &requests, &[(c, 1), (d, 1), (b, 1)]);
    for id in [b, c, d] {
        cache.close(id).unwrap();
    }
    assert_eq!((cache.free_pages(), cache.is_empty()), (10, true));
}

/// Prompts longer than a page, whose pages are partly consecutive, next to decoding and to prompts of another sequence.
#[test]
fn long_chunks_are_written_next_to_single_tokens() {
    let mut random = Random::new(54);
    let shape = PagedShape { pages: 30, ..SHAPE };
    let mut cache = PagedKvCache::new(shape, DType::F32, &CPU).unwrap();
    let ids: Vec<SequenceId> = (0..4).map(|_| cache.open()).collect();
    let requests: BTreeMap<SequenceId, Request> = ids.iter().map(|id| (*id, request(&mut random, 45))).collect();
    let [a, b, c, d] = [ids[0], ids[1], ids[2], ids[3]];
    run(&mut cache, &requests, &[(a, 18)]);
    run(&mut cache, &requests, &[(b, 6), (a, 1)]);
    // The last page of the first sequence is full before its next ones, which are not consecutive with it.
    run(&mut cache, &requests, &[(b, 1), (a, 22), (c, 3), (d, 17)]);
    cache.close(b).unwrap();
    run(&mut cache, &requests, &[(c, 20), (a, 1), (d, 1)]);
    run(&mut cache, &requests, &[(d, 16), (c, 1), (a, 1)]);
}

#[test]
fn a_decode_step_is_overwritten_in_place() {
    let mut random = Random::new(55);
    let mut cache = PagedKvCache::new(SHAPE, DType::F32, &CPU).unwrap();
    let (a, b) = (cache.open(), cache.open());
    let requests: BTreeMap<SequenceId, Request> = [a, b].map(|id| (id, request(&mut random, 16))).into();
    run(&mut cache, &requests, &[(a, 6), (b, 3)]);
    let mut step = cache.decode_step(4, 16).unwrap();
    // The tensors of the first filling are those that a CUDA graph would have captured.
    let captured = step.pages().clone();
    let positions = step.positions().clone();
    for ids in [&[b, a][..], &[a], &[a, b], &[b, a]] {
        let before: Vec<usize> = ids.iter().map(|id| cache.len(*id).unwrap()).collect();
        cache.refill(&mut step, ids).unwrap();
        assert_eq!(positions.to_vec1::<u32>().unwrap()[..ids.len()], before.iter().map(|n| *n as u32).collect::<Vec<_>>());
        for layer in [0, 1] {
            let rows = |operand: usize| {
                let mut rows: Vec<Tensor> = ids
                    .iter()
                    .zip(&before)
                    .map(|(id, at)| requests[id][layer][operand].narrow(2, *at, 1).unwrap().squeeze(2).unwrap())
                    .collect();
                // Idle rows have numbers too, which no sequence reads.
                rows.resize(4, (rows[0].ones_like().unwrap() * 1e3).unwrap());
                Tensor::cat(&rows, 0).unwrap()
            };
            cache.append(layer, &step, &rows(1), &rows(2)).unwrap();
            let [k, v] = cache.pools(layer).unwrap();
            let o = Attention::new().mask(Mask::causal_ends()).forward_paged(&captured, &rows(0), k, v).unwrap();
            for (n, (id, at)) in ids.iter().zip(&before).enumerate() {
                let [q, k, v] = &requests[id][layer];
                let want = textbook([q, k, v]).squeeze(0).unwrap().narrow(1, *at, 1).unwrap().squeeze(1).unwrap();
                close(&format!("{id:?} at {at}"), &o.get(n).unwrap(), &want, 1e-5);
            }
            let idle = o.narrow(0, ids.len(), 4 - ids.len()).unwrap().abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
            assert_eq!(idle, 0.);
        }
    }
    let mut small = cache.decode_step(1, 8).unwrap();
    told(
        cache.refill(&mut small, &[a, b]),
        &["sequences of the step: got 2, expected at most 1", "keys of sequence 0: got 11, expected at most 8, the keys of the step"],
    );
    let mut other = cache.step(&[(a, 1)]).unwrap();
    told(cache.refill(&mut other, &[a]), &["step: got a step of `step`, expected a step of `decode_step`"]);
    told(cache.decode_step(0, 41), &["sequences: got 0", "keys: got 41, expected between 1 and 40"]);
    told(
        cache.append(0, &small, &Tensor::zeros((1, 2, 8), DType::F32, &CPU).unwrap(), &Tensor::zeros((1, 2, 5), DType::F32, &CPU).unwrap()),
        &["step: got an earlier step"],
    );
}

#[test]
fn a_paged_cache_refuses_what_does_not_fit_and_stays_unchanged() {
    let mut cache = PagedKvCache::new(SHAPE, DType::F32, &CPU).unwrap();
    let (a, b) = (cache.open(), cache.open());
    let closed = cache.open();
    cache.close(closed).unwrap();
    told(
        cache.step(&[(a, 39), (b, 5), (a, 1), (closed, 0)]),
        &[
            "sequence 2: got",
            "twice, expected each sequence once",
            "sequence 3: got",
            "expected a sequence of this cache",
            "tokens of sequence 3: got 0",
            "new pages of the step: got 13, expected at most 10, the free pages of 10; close a sequence",
        ],
    );
    told(cache.step(&[]), &["sequences of the step: got 0"]);
    told(cache.close(closed), &["sequence: got", "expected a sequence of this cache"]);
    assert_eq!((cache.free_pages(), cache.len(a), cache.pages_for(a, 5)), (10, Some(0), 2));

    let mut other = PagedKvCache::new(SHAPE, DType::F32, &CPU).unwrap();
    let foreign = other.open();
    told(cache.step(&[(foreign, 1)]), &["sequence 0: got"]);
    let step = cache.step(&[(a, 2)]).unwrap();
    let (k, v) = (Tensor::zeros((2, 2, 8), DType::F32, &CPU).unwrap(), Tensor::zeros((2, 2, 5), DType::F32, &CPU).unwrap());
    told(other.append(0, &step, &k, &v), &["step: got an earlier step"]);
    let var = Var::from_tensor(&k).unwrap();
    told(
        cache.append(2, &step, &var, &k.to_dtype(DType::BF16).unwrap()),
        &[
            "layer: got 2, expected below 2",
            "k: got a tensor that requires a gradient",
            "v shape: got [2, 2, 8], expected [2, 2, 5]",
            "v dtype: got bf16",
        ],
    );
    cache.append(1, &step, &k, &v).unwrap();
    let later = cache.step(&[(b, 1)]).unwrap();
    told(cache.append(0, &step, &k, &v), &["step: got an earlier step, expected the latest"]);
    cache.close(a).unwrap();
    told(cache.append(0, &later, &k.narrow(0, 0, 1).unwrap(), &v.narrow(0, 0, 1).unwrap()), &["step: got an earlier step"]);
    told(
        PagedKvCache::new(PagedShape { layers: 0, pages: usize::MAX, page_size: 2, ..SHAPE }, DType::U8, &CPU),
        &["layers: got 0, expected at least 1", "pages, page_size: got", "dtype: got u8"],
    );
}
