//! Merging partial results by their row maxima and sums of exponentials gives the result over all keys.

use crate::CpuExecutor;
use crate::isa::Isa;
use crate::tests::Random;
use sdpa_core::executor::Executor;
use sdpa_core::{Align, AttentionSpec, DType, HostForward, Layout, Mask, Param, SINK, Shape};

const HEADS: usize = 2;
const QUERIES: usize = 9;
const KEYS: usize = 700;
const DIM: usize = 8;

/// The result over some keys.
struct Part {
    o: Vec<f32>,
    stats: Vec<f32>,
    row_max: Vec<f32>,
    sum_exp: Vec<f32>,
}

fn attend(isa: Isa, threads: usize, [q, k, v]: [&[f32]; 3], mask: Mask, sink: Option<&[f32]>) -> Part {
    let shape = Shape {
        batch: 1,
        heads_q: HEADS as i64,
        heads_kv: 1,
        seq_q: QUERIES as i64,
        seq_kv: (k.len() / DIM) as i64,
        dim_qk: DIM as i64,
        dim_v: DIM as i64,
    };
    let mut spec = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).mask(mask).with_stats().with_row_max().with_sum_exp();
    spec.sink = sink.is_some();
    let params: Vec<Param<'_>> = sink.map(|sink| Param::new(SINK, sink)).into_iter().collect();
    let mut o = vec![f32::NAN; HEADS * QUERIES * DIM];
    let [mut stats, mut row_max, mut sum_exp] = [(); 3].map(|()| vec![f32::NAN; HEADS * QUERIES]);
    let prepared = CpuExecutor::with_isa(isa).prepare(&spec.validate().unwrap()).unwrap();
    let call = HostForward::new(q, k, v, &mut o).stats(&mut stats).row_max(&mut row_max).sum_exp(&mut sum_exp).params(&params);
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| prepared.forward(call)).unwrap();
    Part { o, stats, row_max, sum_exp }
}

fn merged(one: &Part, other: &Part) -> Part {
    let mut all = Part { o: one.o.clone(), stats: Vec::new(), row_max: Vec::new(), sum_exp: Vec::new() };
    for row in 0..HEADS * QUERIES {
        let max = one.row_max[row].max(other.row_max[row]);
        let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let [a, b] = [one, other].map(|part| part.sum_exp[row] * (part.row_max[row] - shift).exp());
        for at in row * DIM..(row + 1) * DIM {
            all.o[at] = if a + b > 0.0 { (a * one.o[at] + b * other.o[at]) / (a + b) } else { 0.0 };
        }
        all.row_max.push(max);
        all.sum_exp.push(a + b);
        all.stats.push(max + (a + b).ln());
    }
    all
}

#[test]
fn two_parts_of_the_keys_merge_to_the_whole() {
    let mut random = Random(11);
    let mut numbers = |n: usize| (0..n).map(|_| random.element()).collect::<Vec<f32>>();
    let (q, k, v) = (numbers(HEADS * QUERIES * DIM), numbers(KEYS * DIM), numbers(KEYS * DIM));
    let near = |one: &[f32], other: &[f32]| one.iter().zip(other).all(|(x, y)| x == y || (x - y).abs() <= 2e-5 * (1.0 + y.abs()));
    for isa in Isa::all() {
        // With few keys, the first rows attend only to keys of the second part, or to no key. Many keys make each part split again.
        for (keys, cut) in [(12usize, 1usize), (12, 8), (QUERIES, 4), (KEYS, 350), (KEYS, 699)] {
            let beyond = Some((keys - QUERIES) as i64);
            for sink in [None, Some([0.5f32, f32::NEG_INFINITY]), Some([60.0, -60.0])] {
                let sink = sink.as_ref().map(|sink| &sink[..]);
                let corner = Mask::causal_bottom_right();
                let (k, v) = (&k[..keys * DIM], &v[..keys * DIM]);
                let whole = attend(isa, 3, [&q, k, v], corner.clone(), sink);
                // Only the second part gets the sink.
                let first = attend(isa, 1, [&q, &k[..cut * DIM], &v[..cut * DIM]], Mask::window(None, beyond, Align::TopLeft), None);
                let second = attend(isa, 2, [&q, &k[cut * DIM..], &v[cut * DIM..]], corner, sink);
                let both = merged(&first, &second);
                let what = format!("{isa:?}, {keys} keys cut at {cut}, sink {sink:?}");
                assert!(near(&both.o, &whole.o), "{what}: o");
                assert!(near(&both.row_max, &whole.row_max), "{what}: {:?} {:?}", both.row_max, whole.row_max);
                assert!(near(&both.sum_exp, &whole.sum_exp), "{what}: {:?} {:?}", both.sum_exp, whole.sum_exp);
                assert!(near(&both.stats, &whole.stats), "{what}: stats");
            }
        }
    }
}
