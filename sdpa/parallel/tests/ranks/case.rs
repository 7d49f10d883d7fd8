//! Masks and score_mods, as text for the ranks and as functions of a position for textbook attention; strategies and shardings.

use sdpa_core::expr::{Declared, ParamKind};
use sdpa_core::half::{bf16, f16};
use sdpa_core::{Chunk, DType, Param, ParamValue};
use sdpa_parallel::{Sharding, Strategy};

/// A position: (batch, head, q, k).
pub(crate) type At = [i64; 4];

/// A mask: its text, and whether it attends to a pair in a problem of (seq_q, seq_kv).
pub(crate) type MaskCase = (&'static str, fn(At, [i64; 2]) -> bool);

/// A score_mod: its text, its value, and its derivative with respect to the score.
pub(crate) type ModCase = (&'static str, fn(f64, At) -> f64, fn(f64, At) -> f64);

pub(crate) const MASKS: [MaskCase; 8] = [
    ("", |_, _| true),
    ("causal", |[_, _, q, k], _| k <= q),
    ("window:7,0", |[_, _, q, k], _| k <= q && q - k < 7),
    ("prefix-lm:9", |[_, _, q, k], _| k <= q || k < 9),
    ("document", |at, _| value("doc_q", at) == value("doc_k", at)),
    ("tensor own[head, q, k]: bool; own", |at, _| value("own", at) != 0.0),
    ("window:5,3:bottom-right", |[_, _, q, k], [seq_q, seq_kv]| {
        let past = k - q - (seq_kv - seq_q);
        past > -5 && past <= 3
    }),
    ("padding & causal-ends", |at, [seq_q, seq_kv]| {
        let (len_q, len_kv) = (value("seq_len_q", at) as i64, value("seq_len_kv", at) as i64);
        let [_, _, q, k] = at;
        q < len_q.min(seq_q) && k < len_kv.min(seq_kv) && k - q <= len_kv.min(seq_kv) - len_q.min(seq_q)
    }),
];

pub(crate) const MODS: [ModCase; 7] = [
    ("", |x, _| x, |_, _| 1.0),
    ("softcap:3", |x, _| 3.0 * (x / 3.0).tanh(), |x, _| 1.0 - (x / 3.0).tanh().powi(2)),
    ("tensor slopes[head]: f32; score + slopes * f32(k - q)", |x, at| x + value("slopes", at) * (at[3] - at[2]) as f64, |_, _| 1.0),
    ("tensor t_q[q]: f32; score * t_q", |x, at| x * value("t_q", at), |_, at| value("t_q", at)),
    ("tensor t_k[k]: f32; score + t_k", |x, at| x + value("t_k", at), |_, _| 1.0),
    ("tensor bias[head, q, k]: f32; score + bias", |x, at| x + value("bias", at), |_, _| 1.0),
    (
        "score + 0.25 * f32((q * 7 + k * 3 + head * 5 + batch) % 11)",
        |x, at| x + 0.25 * ((at[2] * 7 + at[3] * 3 + at[1] * 5 + at[0]) % 11) as f64,
        |_, _| 1.0,
    ),
];

/// Returns the value of a parameter at a position of the whole problem; a number that f32 and f16 hold exactly.
pub(crate) fn value(name: &str, [batch, head, q, k]: At) -> f64 {
    match name {
        "doc_q" => (q / 7) as f64,
        "doc_k" => (k / 7) as f64,
        "own" => f64::from(u8::from((q * 5 + k * 3 + head * 2) % 4 != 1 && q != 6)),
        "slopes" => -0.0625 * (head + 1) as f64,
        "t_q" => 0.5 + 0.125 * (q % 9) as f64,
        "t_k" => 0.25 * (k % 7) as f64 - 0.5,
        "bias" => 0.25 * ((3 * q + 5 * k + head) % 13) as f64 - 1.0,
        "sink" => 0.5 * head as f64 - 1.0,
        "seq_len_q" => [13, 40][(batch % 2) as usize] as f64,
        "seq_len_kv" => [40, 11][(batch % 2) as usize] as f64,
        "cap" => 3.0,
        "dropout_seed" => 77.0,
        "dropout_offset" => 5.0,
        other => panic!("{other}"),
    }
}

/// The values of a tensor parameter.
#[derive(Debug)]
pub(crate) enum Values {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    I32(Vec<i32>),
    I64(Vec<i64>),
    Bool(Vec<bool>),
}

impl Values {
    fn value(&self) -> ParamValue<'_> {
        match self {
            Values::F32(x) => x.into(),
            Values::F16(x) => x.into(),
            Values::BF16(x) => x.into(),
            Values::I32(x) => x.into(),
            Values::I64(x) => x.into(),
            Values::Bool(x) => x.into(),
        }
    }
}

/// Returns the whole tensors of all declared tensor parameters.
pub(crate) fn values(declared: &[Declared], extents: [i64; 4]) -> Vec<(String, Values)> {
    let of = |p: &Declared| {
        let ParamKind::Tensor { axes, dtype } = p.kind else { return None };
        let dims = axes.dims(extents);
        let places = (0..dims.iter().product::<i64>()).map(|n| {
            let along = |axis: usize| n / dims[axis + 1..].iter().product::<i64>() % dims[axis];
            [0, 1, 2, 3].map(along)
        });
        let numbers = places.map(|at| value(&p.name, at));
        let values = match dtype {
            DType::F32 => Values::F32(numbers.map(|x| x as f32).collect()),
            DType::F16 => Values::F16(numbers.map(f16::from_f64).collect()),
            DType::BF16 => Values::BF16(numbers.map(bf16::from_f64).collect()),
            DType::I32 => Values::I32(numbers.map(|x| x as i32).collect()),
            DType::I64 => Values::I64(numbers.map(|x| x as i64).collect()),
            DType::Bool => Values::Bool(numbers.map(|x| x != 0.0).collect()),
            DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => panic!("{dtype}"),
        };
        Some((p.name.clone(), values))
    };
    declared.iter().filter_map(of).collect()
}

pub(crate) fn params(values: &[(String, Values)]) -> Vec<Param<'_>> {
    values.iter().map(|(name, values)| Param::new(name, values.value())).collect()
}

pub(crate) const STRATEGIES: [Strategy; 7] = [
    Strategy::AllGather { head_groups: 1 },
    Strategy::AllGather { head_groups: 2 },
    Strategy::HeadExchange,
    Strategy::Ring,
    Strategy::Halo,
    Strategy::Grid { heads: 2 },
    Strategy::Grid { heads: 3 },
];

/// Returns chunks in no order, with strides and single tokens among them.
pub(crate) fn scattered(ranks: usize, seq: i64) -> Sharding {
    let mut lists = vec![Vec::new(); ranks];
    let evens = seq / 4;
    lists[ranks - 1].push(Chunk::new(1, 2, evens));
    lists[0].push(Chunk::new(0, 2, evens));
    let mut start = 2 * evens;
    for n in 0.. {
        let len = (seq - start).min(1 + n % 4);
        if len == 0 {
            break;
        }
        lists[(3 * n as usize + 1) % ranks].insert(0, Chunk::new(start, 1, len));
        start += len;
    }
    Sharding::Chunks(lists)
}

pub(crate) fn shardings(ranks: usize, seq: i64) -> [Sharding; 4] {
    [Sharding::Contiguous, Sharding::Zigzag, Sharding::Striped, scattered(ranks, seq)]
}
