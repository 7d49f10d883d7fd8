//! Rows of scores that are very low or very high but finite, in both kernel families: every cut of tiles, splits of the keys, sinks.

use super::{executor, mma};
use conformance::runner::{ADDED, Where, large_scores, side_by_side};
use conformance::share::{DAYS, of_today};
use sdpa::cuda::CudaExecutor;
use sdpa::{DType, Shape};
use std::sync::Mutex;

/// Tiles of one and of several thread blocks, 2-CTA clusters, query heads in one tile, splits of the keys.
const SHAPES: [Shape; 6] = [
    Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 70, seq_kv: 150, dim_qk: 64, dim_v: 64 },
    Shape { batch: 1, heads_q: 2, heads_kv: 2, seq_q: 150, seq_kv: 290, dim_qk: 128, dim_v: 128 },
    Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 130, seq_kv: 140, dim_qk: 192, dim_v: 128 },
    Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 70, seq_kv: 200, dim_qk: 256, dim_v: 256 },
    Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q: 1, seq_kv: 2100, dim_qk: 64, dim_v: 64 },
    Shape { batch: 1, heads_q: 4, heads_kv: 1, seq_q: 3, seq_kv: 1500, dim_qk: 128, dim_v: 64 },
];

#[derive(Clone, Copy)]
struct Drawn {
    shape: Shape,
    dtype: DType,
    place: Where,
    added: f32,
    sink: bool,
}

fn all(dtypes: &[DType]) -> Vec<Drawn> {
    let mut all = Vec::new();
    for (n, shape) in SHAPES.into_iter().enumerate() {
        for (m, added) in ADDED.into_iter().enumerate() {
            for place in Where::ALL {
                let dtype = dtypes[(n + m + usize::from(place == Where::Keys)) % dtypes.len()];
                all.push(Drawn { shape, dtype, place, added, sink: (n + m) % 3 == 1 });
            }
        }
    }
    all
}

fn check(name: &str, executor: &CudaExecutor, dtypes: &[DType]) {
    let problems = of_today(&format!("large scores {name}"), DAYS, all(dtypes), |drawn| {
        vec![format!("{:?} {:?}", drawn.shape, drawn.place), format!("{:?} {}", drawn.dtype, drawn.added), drawn.sink.to_string()]
    });
    let wrong = Mutex::new(Vec::new());
    side_by_side(&problems, |&Drawn { shape, dtype, place, added, sink }| {
        if let Err(how) = large_scores(executor, dtype, shape, place, added, sink) {
            wrong.lock().unwrap().push(format!("{dtype} {shape:?}, {added} to {place:?}, sink {sink}: {how}"));
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} of {} are wrong:\n{}", wrong.len(), problems.len(), wrong.join("\n"));
}

#[test]
fn large_scores_of_wgmma() {
    executor().iter().for_each(|executor| check("wgmma", executor, &[DType::BF16, DType::F16]));
}

#[test]
fn large_scores_of_mma() {
    mma::executor().iter().for_each(|executor| check("mma", executor, &[DType::BF16, DType::F32, DType::F16]));
}
