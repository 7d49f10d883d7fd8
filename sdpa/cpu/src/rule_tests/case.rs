//! Score_mods and masks, each with its meaning as a plain closure.

use crate::tests::Random;
use half::{bf16, f16};
use sdpa_core::expr::{Axis, BF16, Bool, F16, F32, I32, ParamKind};
use sdpa_core::library::{self, alibi_slopes, array_mask, bias};
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::tensor::ParamValue;
use sdpa_core::{DType, Mask, Param, Problem, ScoreMod, params};

/// (batch, head, q, k).
pub(super) type At = [usize; 4];

/// The value of a parameter.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Scalar(f32),
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    I32(Vec<i32>),
    Bool(Vec<bool>),
}

impl Value {
    pub(super) fn bound(&self) -> ParamValue<'_> {
        match self {
            Value::Scalar(x) => ParamValue::Scalar(*x),
            Value::F32(x) => ParamValue::F32(x),
            Value::F16(x) => ParamValue::F16(x),
            Value::BF16(x) => ParamValue::BF16(x),
            Value::I32(x) => ParamValue::I32(x),
            Value::Bool(x) => ParamValue::Bool(x),
        }
    }
}

/// Every parameter of a problem: its name, dims and value.
#[derive(Clone, Debug)]
pub(super) struct Values(pub(super) Vec<(String, [usize; 4], Value)>);

impl Values {
    pub(super) fn random(problem: &Problem, random: &mut Random) -> Values {
        let all = problem.params().iter().map(|p| {
            let n = params::elements(p, problem.extents()) as usize;
            // Slopes are multiplied by distances, so keep them small: f32 loses precision in large products.
            let size = if p.name == "slopes" { 0.05 } else { 0.7 };
            let mut floats = || (0..n).map(|_| random.element() * size).collect::<Vec<f32>>();
            let (dims, value) = match p.kind {
                ParamKind::Scalar => ([1; 4], Value::Scalar(1.5 + floats()[0].abs())),
                ParamKind::Tensor { axes, dtype } => {
                    let value = if dtype == DType::F32 {
                        Value::F32(floats())
                    } else if dtype == DType::F16 {
                        Value::F16(floats().into_iter().map(f16::from_f32).collect())
                    } else if dtype == DType::BF16 {
                        Value::BF16(floats().into_iter().map(bf16::from_f32).collect())
                    } else if dtype == DType::I32 {
                        Value::I32(whole_numbers(&p.name, n, problem, random))
                    } else {
                        Value::Bool((0..n).map(|_| random.below(3) > 0).collect())
                    };
                    (axes.dims(problem.extents()), value)
                }
            };
            (p.name.clone(), dims.map(|n| n as usize), value)
        });
        Values(all.collect())
    }

    pub(super) fn place(&self, name: &str, at: At) -> usize {
        let (_, dims, _) = self.0.iter().find(|(n, ..)| n == name).unwrap();
        at.iter().zip(dims).fold(0, |place, (&at, &dim)| place * dim + if dim == 1 { 0 } else { at })
    }

    pub(super) fn dims(&self, name: &str) -> [usize; 4] {
        self.0.iter().find(|(n, ..)| n == name).unwrap().1
    }

    pub(super) fn get(&self, name: &str, at: At) -> f64 {
        let (_, _, value) = self.0.iter().find(|(n, ..)| n == name).unwrap();
        value.bound().get(self.place(name, at))
    }

    pub(super) fn bound(&self) -> Vec<Param<'_>> {
        self.0.iter().map(|(name, _, value)| Param::new(name, value.bound())).collect()
    }
}

fn whole_numbers(name: &str, n: usize, problem: &Problem, random: &mut Random) -> Vec<i32> {
    let most = match name {
        SEQ_LEN_Q => problem.seq_q() as i32,
        SEQ_LEN_KV => problem.seq_kv() as i32,
        _ => return (0..n).map(|i| (i * 3 / n.max(1)) as i32 + random.below(2) as i32).collect(),
    };
    (0..n).map(|_| random.pick(&[0, -3, most, most + 5, most / 2, most / 2, 1, (most - 1).max(0)])).collect()
}

type Function = Box<dyn Fn(f64, At, &Values) -> f64 + Send + Sync>;

/// A score_mod, its derivative, and the derivatives with respect to parameters.
pub(super) struct Modified {
    pub(super) stages: Vec<ScoreMod>,
    pub(super) value: Function,
    pub(super) slope: Function,
    pub(super) along: Vec<(&'static str, Function)>,
}

fn modified(
    stages: Vec<ScoreMod>,
    value: impl Fn(f64, At, &Values) -> f64 + Send + Sync + 'static,
    slope: impl Fn(f64, At, &Values) -> f64 + Send + Sync + 'static,
) -> Modified {
    Modified { stages, value: Box::new(value), slope: Box::new(slope), along: Vec::new() }
}

impl Modified {
    fn along(mut self, name: &'static str, slope: impl Fn(f64, At, &Values) -> f64 + Send + Sync + 'static) -> Modified {
        self.along.push((name, Box::new(slope)));
        self
    }
}

fn one(_: f64, _: At, _: &Values) -> f64 {
    1.0
}

fn distance(at: At) -> f64 {
    at[3] as f64 - at[2] as f64
}

fn cap_slope(score: f64, at: At, v: &Values) -> f64 {
    let x = score / v.get("cap", at);
    x.tanh() - x * (1.0 - x.tanh().powi(2))
}

/// Returns a set of axes.
pub(super) fn axes(bits: usize) -> Vec<Axis> {
    Axis::ALL.into_iter().filter(|axis| bits & 1 << axis.place() != 0).collect()
}

pub(super) const MODS: usize = 26;

pub(super) fn score_mod(n: usize, heads: usize) -> Modified {
    let cap = |score: f64, at, v: &Values| (score / v.get("cap", at)).tanh() * v.get("cap", at);
    let flat = |score: f64, at, v: &Values| 1.0 - (score / v.get("cap", at)).tanh().powi(2);
    let slopes = alibi_slopes(heads);
    match n {
        0..16 => {
            let axes: sdpa_core::expr::Axes = axes(n).into_iter().collect();
            let stage = match n % 3 {
                0 => bias(axes, F32),
                1 => bias(axes, F16),
                _ => bias(axes, BF16),
            };
            modified(vec![stage], |s, at, v| s + v.get("bias", at), one).along("bias", one)
        }
        16 => modified(vec![library::softcap(3.0)], cap, flat).along("cap", cap_slope),
        17 => modified(vec![library::alibi()], move |s, at, _| s + f64::from(slopes[at[1]]) * distance(at), one),
        18 => modified(vec![library::alibi_with()], |s, at, v| s + v.get("slopes", at) * distance(at), one)
            .along("slopes", |_, at, _| distance(at)),
        19 => modified(
            vec![library::sandwich(3)],
            move |s, at, _| {
                let sum: f64 = (0..3).map(|i| (distance(at) * f64::from(10_000f64.powf(-f64::from(i) / 3.0) as f32)).cos()).sum();
                s + f64::from(slopes[at[1]]) * sum
            },
            one,
        ),
        20 => modified(
            vec![library::softcap(3.0).then(library::alibi_with()), bias([Axis::Q, Axis::K], F32)],
            move |s, at, v| cap(s, at, v) + v.get("slopes", at) * distance(at) + v.get("bias", at),
            flat,
        )
        .along("slopes", |_, at, _| distance(at))
        .along("cap", cap_slope)
        .along("bias", one),
        21 => modified(
            vec![ScoreMod::new("whole", |s, _, p| s + p.tensor("w", [Axis::Batch, Axis::K], I32).to_f32() * 0.1).unwrap()],
            |s, at, v| s + 0.1f32 as f64 * v.get("w", at),
            one,
        ),
        22 => modified(
            vec![ScoreMod::new("flip", |s, _, p| p.tensor("b", [Axis::Head, Axis::Q, Axis::K], Bool).select(s, s * -0.5)).unwrap()],
            |s, at, v| if v.get("b", at) != 0.0 { s } else { -0.5 * s },
            |_, at, v| if v.get("b", at) != 0.0 { 1.0 } else { -0.5 },
        ),
        // This score_mod uses the score, the position, and a parameter twice. Derivatives of masked-out pairs are infinite.
        23 => modified(
            vec![
                ScoreMod::new("gain", |s, at, p| {
                    let far = (at.q - at.k).abs().to_f32();
                    s * p.tensor("gain", [Axis::Q], F32) + far.sqrt() * p.tensor("gain", [Axis::Q], F32) * 0.1
                })
                .unwrap(),
            ],
            |s, at, v| v.get("gain", at) * (s + f64::from(0.1f32) * distance(at).abs().sqrt()),
            |_, at, v| v.get("gain", at),
        )
        .along("gain", |s, at, _| s + f64::from(0.1f32) * distance(at).abs().sqrt()),
        // The result does not depend on the score.
        24 => modified(
            vec![ScoreMod::new("place", |s, at, _| (at.k - at.q).to_f32() * 0.125 + s * 0.0).unwrap()],
            |s, at, _| distance(at) * 0.125 + s * 0.0,
            |_, _, _| 0.0,
        ),
        _ => modified(
            vec![
                ScoreMod::new("by hand", |s, _, _| s * s * 0.25)
                    .unwrap()
                    .with_bprop(|g, s, _, p| g * s * 0.5 * p.scalar("half", 1.0))
                    .unwrap(),
            ],
            |s, _, _| 0.25 * s * s,
            |s, _, _| 0.5 * s,
        ),
    }
}

type Keeps = Box<dyn Fn(At, &Values) -> bool + Send + Sync>;

/// A mask, and the pairs that it keeps.
pub(super) struct Masked {
    pub(super) masks: Vec<Mask>,
    pub(super) keep: Keeps,
}

fn masked(masks: Vec<Mask>, keep: impl Fn(At, &Values) -> bool + Send + Sync + 'static) -> Masked {
    Masked { masks, keep: Box::new(keep) }
}

pub(super) const MASKS: usize = 31;

pub(super) fn mask(n: usize, [_, _, _, seq_kv]: [usize; 4]) -> Masked {
    let documents = |at, v: &Values| v.get("doc_q", at) == v.get("doc_k", at);
    let padding = |at: At, v: &Values| (at[2] as f64) < v.get(SEQ_LEN_Q, at) && (at[3] as f64) < v.get(SEQ_LEN_KV, at);
    let far = |at: At| at[2].abs_diff(at[3]);
    match n {
        0..16 => masked(vec![array_mask(axes(n).into_iter().collect::<sdpa_core::expr::Axes>())], |at, v| v.get("mask", at) != 0.0),
        16 => masked(vec![], |_, _| true),
        17 => masked(vec![Mask::causal()], |at, _| at[3] <= at[2]),
        18 => masked(vec![library::dilated(3)], move |at, _| far(at) % 3 == 0),
        19 => masked(vec![Mask::document()], documents),
        20 => masked(vec![Mask::padding()], padding),
        21 => masked(vec![Mask::padding(), Mask::causal()], move |at, v| padding(at, v) && at[3] <= at[2]),
        22 => masked(vec![library::natten(5)], move |at, _| {
            let first = (at[2] as i64 - 2).min(seq_kv as i64 - 5).max(0) as usize;
            (first..first + 5).contains(&at[3])
        }),
        23 => masked(vec![library::global_local(4, 2)], move |at, _| far(at) < 4 || at[3] < 2 || at[2] < 2),
        24 => masked(vec![Mask::document() & Mask::causal()], move |at, v| documents(at, v) && at[3] <= at[2]),
        25 => masked(vec![Mask::document() | library::dilated(4)], move |at, v| documents(at, v) || far(at) % 4 == 0),
        26 => masked(vec![!Mask::document()], move |at, v| !documents(at, v)),
        27 => masked(vec![library::shared_prefix(3), Mask::padding()], move |at, v| (at[3] < 3 || documents(at, v)) && padding(at, v)),
        28 => masked(vec![Mask::prefix_lm(5), library::dilated(2)], move |at, _| (at[3] <= at[2] || at[3] < 5) && far(at) % 2 == 0),
        29 => masked(vec![Mask::new("none", |at, _| at.k.lt(at.q) & at.q.lt(at.k)).unwrap()], |_, _| false),
        _ => masked(vec![Mask::padding() | Mask::causal()], move |at, v| padding(at, v) || at[3] <= at[2]),
    }
}
