//! Graphs of packed documents. The interpreter reads packed tensors as if each document were of the longest, so operands are padded, with
//! numbers that nothing may depend on; of results, what is behind the end of a document is not there.

use super::{CONSTANTS, Case, EXACT, NEW, Numbers, OLD, values};
use conformance::library::Library;
use conformance::packing::Packing;
use conformance::random::Random;
use sdpa::cudnn::lower::Form;
use sdpa::{AttentionSpec, DType, Layout, ScoreMod, Shape};

const MODS: [&[&str]; 10] = [
    &[],
    &["softcap:2"],
    &["alibi"],
    &["bias:h"],
    &["bias:hqk"],
    &["bias16:bqk"],
    &["temperature"],
    &["bias:hqk", "softcap:2"],
    &["row-place"],
    &["row-place-of-keys"],
];

const MASKS: [&[&str]; 10] = [
    &[],
    &["causal"],
    &["window:3,1"],
    &["prefix-lm:2"],
    &["dilated:2"],
    &["array:bqk"],
    &["document", "causal"],
    &["causal-bottom-right", "window:2,inf:bottom-right"],
    &["causal-ends"],
    &["window:3,1:ends", "dilated:2"],
];

/// Lengths of queries, those of keys where they are others, and heads.
type Documents = (&'static [i64], Option<&'static [i64]>, [i64; 2]);

const DOCUMENTS: [Documents; 5] = [
    (&[6, 0, 3], None, [4, 2]),
    (&[1, 5], None, [3, 3]),
    (&[5, 0, 2, 3], Some(&[4, 3, 0, 7]), [4, 2]),
    (&[2, 6], Some(&[5, 1]), [4, 1]),
    (&[7], Some(&[3]), [2, 2]),
];

fn packing((lengths_q, lengths_kv, _): Documents, before: i64, wide: bool) -> Packing {
    let lengths_kv = lengths_kv.map(<[i64]>::to_vec);
    Packing { lengths_q: lengths_q.to_vec(), lengths_kv, before, slack: 0, unbounded: false, wide }
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// Whether a problem has these: boundaries by name, and documents whose lower right corners are the same.
fn possible(cross: bool, mods: &[&str], masks: &[&str]) -> bool {
    let absent = if cross { "row-place" } else { "row-place-of-keys" };
    let by_corner = masks.iter().any(|mask| mask.contains("bottom-right"));
    !(mods.contains(&absent) || cross && by_corner)
}

fn spec(packing: &Packing, [heads_q, heads_kv]: [i64; 2], layout: Layout, mods: &[String], masks: &[String]) -> AttentionSpec {
    let most = |lengths: &[i64]| lengths.iter().max().copied().unwrap_or(1);
    let seq_q = most(&packing.lengths_q);
    let seq_kv = packing.lengths_kv.as_deref().map_or(seq_q, most);
    let shape = Shape { batch: packing.lengths_q.len() as i64, heads_q, heads_kv, seq_q, seq_kv, dim_qk: 8, dim_v: 16 };
    let mut spec = AttentionSpec::dense(DType::BF16, shape, layout).with_stats().with_row_max().with_sum_exp();
    spec.packed = Some(packing.packed());
    let parsed = mods.iter().map(|text| conformance::library::own(text).parse::<ScoreMod>().unwrap_or_else(|e| panic!("{text}: {e}")));
    spec.score_mods = parsed.collect();
    spec.masks = masks.iter().map(|text| text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))).collect();
    spec
}

#[test]
fn graphs_of_packed_documents_mean_each_document_by_itself() {
    let mut failures = Vec::new();
    let mut runs = 0;
    for (n, mods) in MODS.iter().enumerate() {
        for (m, masks) in MASKS.iter().enumerate() {
            for (d, documents) in DOCUMENTS.into_iter().enumerate().filter(|(_, (_, keys, _))| possible(keys.is_some(), mods, masks)) {
                let (mods, masks) = (owned(mods), owned(masks));
                // Expressions read boundaries of i32.
                let wide = m % 3 == 1 && mods.iter().all(|name| !name.starts_with("row-place"));
                let packing = packing(documents, (n % 3) as i64, wide);
                // Head-major packs too.
                let spec = spec(&packing, documents.2, [Layout::Bshd, Layout::Bhsd][(n + m + d) % 2], &mods, &masks);
                let [batch, heads_q, seq_q, _] = spec.q.dims;
                let mut random = Random::new((n * 1000 + m * 10 + d) as u64);
                let extents = [batch, heads_q, seq_q, spec.k.dims[2]];
                let library = Library::draw_packed(&mods, &masks, extents, Some(&packing), &mut random).unwrap();
                let numbers = Numbers::draw(&spec, &mut random);
                let params = values(&spec, &library.bound);
                let tolerance = if mods.iter().any(|m| m == "alibi") { CONSTANTS } else { EXACT };
                let case = Case { spec: &spec, numbers: &numbers, params: &params, packing: Some(&packing), cache: None, tolerance };
                let mut backward = spec.backward();
                backward.deterministic = m % 2 == 0;
                let biased = mods.first().is_some_and(|first| first.starts_with("bias"));
                let wrt: &[&str] = if biased { &["bias"] } else { &[] };
                let asked = wrt.iter().fold(backward, |b, name| b.wrt(name, DType::BF16)).validate().unwrap();
                library.with(wrt, |closures| {
                    let mut told = |what: String, result: Result<(), String>| {
                        runs += 1;
                        failures.extend(result.err().map(|e| format!("{what} of {mods:?} with {masks:?}, {documents:?}: {e}")));
                    };
                    for (form, runtime) in [(Form::Composite, OLD), (Form::Composite, NEW), (Form::Unified, NEW)] {
                        told(format!("{form} {runtime}"), case.forward(closures, form, runtime));
                    }
                    for runtime in [OLD, NEW] {
                        told(format!("backward {runtime}"), case.backward(closures, &asked, runtime));
                    }
                });
            }
        }
    }
    assert!(failures.is_empty(), "{} of {runs}\n{}", failures.len(), failures[..failures.len().min(12)].join("\n"));
}

/// A document that is a token longer or shorter than it is told to be is found, in both passes.
#[test]
fn a_token_too_many_is_found() {
    let documents = DOCUMENTS[2];
    let packing = packing(documents, 1, false);
    let spec = spec(&packing, documents.2, Layout::Bshd, &[], &[]);
    let mut random = Random::new(7);
    let extents = [spec.q.dims[0], spec.q.dims[1], spec.q.dims[2], spec.k.dims[2]];
    let library = Library::draw_packed(&[], &[], extents, Some(&packing), &mut random).unwrap();
    let numbers = Numbers::draw(&spec, &mut random);
    let right = values(&spec, &library.bound);
    let asked = spec.backward().validate().unwrap();
    library.with(&[], |closures| {
        for by in [0.0, 1.0, -1.0] {
            let mut params = right.clone();
            let keys = params.iter_mut().find(|(name, _)| name == "cu_seqlens_kv").unwrap();
            keys.1.last_mut().into_iter().for_each(|end| *end += by);
            let case = Case { spec: &spec, numbers: &numbers, params: &params, packing: Some(&packing), cache: None, tolerance: EXACT };
            for form in [Form::Composite, Form::Unified] {
                // None has more than the longest.
                assert_eq!(case.forward(closures, form, NEW).is_ok(), by >= 0.0, "{form}, {by}");
            }
            assert_eq!(case.backward(closures, &asked, NEW).is_ok(), by >= 0.0, "{by}");
        }
    });
}
