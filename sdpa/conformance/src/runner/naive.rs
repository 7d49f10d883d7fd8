//! A simple executor with injectable faults that the runner must find.

mod rules;

use super::{Draw, Outcome, Source, random_padded_backward, run_backward, run_backward_case, run_case};
use crate::case::Case;
use crate::compare::Measured;
use crate::packing::Laid;
use crate::random::Random;
use half::{bf16, f16};
use rules::Rules;
use sdpa::{
    AttentionSpec, BackwardProblem, BackwardSpec, DROPOUT_OFFSET, DROPOUT_SEED, DType, Elements, ElementsMut, Error, Executor,
    ExecutorName, F8E4M3, F8E5M2, HostBackward, HostForward, Layout, Mask, Param, ParamValue, Prepared, PreparedBackward, Problem, Reason,
    Report, SINK, Shape, StatsBase, TensorSpec, Unsupported,
};
use std::f32::consts::LOG2_E;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    Refuses,
    RefusesWhatItMakes,
    NoDelta,
    NoScale,
    NoMask,
    NoStats,
    OneHeadOfAGroup,
    CoarseWeights,
    CoarseScores,
    WritesGaps,
    AddsToWhatIsThere,
    LeavesTheLastRowOut,
    IgnoresStrides,
    EmptyRowsAreNan,
    NeverTheSameBits,
    NoRest,
    NoLengths,
    NoSlope,
    OnlyDefaults,
    OneElementForAll,
    OneBatchOfAParameter,
    NoParameters,
}

#[derive(Clone, Copy, Debug)]
struct Naive(Fault);

#[derive(Debug)]
struct Ready<P> {
    problem: P,
    fault: Fault,
    calls: AtomicU32,
}

impl Naive {
    fn ready<P: Clone>(&self, problem: &P) -> Arc<Ready<P>> {
        Arc::new(Ready { problem: problem.clone(), fault: self.0, calls: AtomicU32::new(0) })
    }
}

impl Executor for Naive {
    fn name(&self) -> ExecutorName {
        ExecutorName::CPU
    }
    fn supports(&self, _: &Problem) -> Result<(), Unsupported> {
        Ok(())
    }
    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, Error> {
        Ok(self.ready(problem))
    }
    fn supports_backward(&self, _: &BackwardProblem) -> Result<(), Unsupported> {
        let reasons = vec![Reason::Absent("it is a fault".to_owned())];
        let refuses = matches!(self.0, Fault::Refuses | Fault::RefusesWhatItMakes);
        if refuses { Err(Unsupported::new(ExecutorName::CPU, reasons)) } else { Ok(()) }
    }
    fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error> {
        if self.0 == Fault::Refuses {
            self.supports_backward(problem)?;
        }
        Ok(self.ready(problem))
    }
}

fn narrow(dtype: DType, x: f32) -> f32 {
    if dtype == DType::F16 {
        f16::from_f32(x).to_f32()
    } else if dtype == DType::BF16 {
        bf16::from_f32(x).to_f32()
    } else {
        x
    }
}

/// The elements of a tensor in row-major order.
struct Dense(usize, usize, usize, Vec<f32>);

impl Dense {
    fn of(tensor: &TensorSpec, elements: Elements<'_>) -> Dense {
        let get = |at: usize| match &elements {
            Elements::F32(x) => x[at],
            Elements::F16(x) => x[at].to_f32(),
            Elements::BF16(x) => x[at].to_f32(),
            Elements::F8E4M3(x) => x[at].to_f32(),
            Elements::F8E5M2(x) => x[at].to_f32(),
        };
        let [_, heads, seq, dim] = tensor.dims.map(|n| n as usize);
        Dense(heads, seq, dim, Laid::from(tensor).places().into_iter().flatten().map(get).collect())
    }

    fn row(&self, [b, h, i]: [usize; 3]) -> &[f32] {
        &self.3[((b * self.0 + h) * self.1 + i) * self.2..][..self.2]
    }
}

fn place(tensor: &TensorSpec, index: [usize; 4]) -> usize {
    index.iter().zip(tensor.strides).map(|(i, stride)| i * stride as usize).sum()
}

fn set(to: &mut ElementsMut<'_>, at: usize, value: f32, adds: bool) {
    match to {
        ElementsMut::F32(x) => x[at] = if adds { x[at] + value } else { value },
        ElementsMut::F16(x) => x[at] = f16::from_f32(if adds { x[at].to_f32() + value } else { value }),
        ElementsMut::F8E4M3(x) => x[at] = F8E4M3::from_f32(if adds { x[at].to_f32() + value } else { value }),
        ElementsMut::F8E5M2(x) => x[at] = F8E5M2::from_f32(if adds { x[at].to_f32() + value } else { value }),
        ElementsMut::BF16(x) => x[at] = bf16::from_f32(if adds { x[at].to_f32() + value } else { value }),
    }
}

fn dot(x: &[f32], y: &[f32]) -> f32 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

fn add(to: &mut [f32], factor: f32, row: &[f32]) {
    to.iter_mut().zip(row).for_each(|(to, x)| *to += factor * x);
}

/// Returns the sink of a head; −∞ without a sink.
fn sink_of(problem: &Problem, params: &[Param<'_>], head: usize) -> f32 {
    let given = params.iter().find(|p| problem.sink() && p.name == SINK);
    given.map_or(f32::NEG_INFINITY, |sink| sink.value.get(head) as f32)
}

/// Returns the dropout factor of P at a position.
fn left(problem: &Problem, params: &[Param<'_>], [b, h, q, k]: [usize; 4]) -> f32 {
    let number = |name: &str| match params.iter().find(|p| p.name == name).map(|p| p.value) {
        Some(ParamValue::I64(number)) => number[0],
        _ => 0,
    };
    let mask = problem.dropout_mask(number(DROPOUT_SEED), number(DROPOUT_OFFSET)).zip(problem.dropout());
    mask.map_or(1.0, |(mask, dropout)| if mask.keeps([b, h, q, k]) { dropout.scale() } else { 0.0 })
}

impl Prepared for Ready<Problem> {
    fn forward(&self, mut call: HostForward<'_>) -> Result<Report, Error> {
        let p = &self.problem;
        let scale = call.check(p)?;
        let rules = Rules::new(p, p.params(), call.params, self.fault);
        let (q, k, v) = (Dense::of(p.q(), call.q), Dense::of(p.k(), call.k), Dense::of(p.v(), call.v));
        for n in 0..p.stats_elements() as usize {
            let (i, h) = (n % p.seq_q() as usize, n / p.seq_q() as usize);
            let (b, h) = (h / p.heads_q() as usize, h % p.heads_q() as usize);
            let kv = h / p.group() as usize;
            let query = q.row([b, h, i]);
            let index = |j: usize| [b, h, i, j].map(|n| n as i64);
            let keys: Vec<usize> = (0..p.seq_kv() as usize).filter(|&j| rules.keeps(index(j))).collect();
            let scores: Vec<f32> = keys.iter().map(|&j| rules.modified(dot(query, k.row([b, kv, j])) * scale, index(j))).collect();
            let sink = sink_of(p, call.params, h);
            let max = scores.iter().copied().fold(sink, f32::max);
            let own = if sink == f32::NEG_INFINITY { 0.0 } else { (sink - max).exp() };
            let sum: f32 = scores.iter().map(|s| (s - max).exp()).sum::<f32>() + own;
            let mut o = vec![0f32; p.dim_v() as usize];
            for (&j, score) in keys.iter().zip(&scores) {
                let left = left(p, call.params, [b, h, i, j]);
                add(&mut o, left * narrow(p.dtype(), (score - max).exp()) / sum, v.row([b, kv, j]));
            }
            for (d, &x) in o.iter().enumerate() {
                set(&mut call.o, place(p.o(), [b, h, i, d]), x, false);
            }
            if let Some(stats) = call.stats.as_deref_mut() {
                let natural = if keys.is_empty() { max } else { max + sum.ln() };
                stats[n] = if p.stats_base() == StatsBase::Two { natural * LOG2_E } else { natural };
            }
            if let Some(row_max) = call.row_max.as_deref_mut() {
                row_max[n] = max;
            }
            if let Some(sum_exp) = call.sum_exp.as_deref_mut() {
                sum_exp[n] = sum;
            }
        }
        Ok(Report::default())
    }
}

impl Ready<BackwardProblem> {
    /// Returns gradients in row-major order, and those of parameters.
    fn gradients(&self, call: &HostBackward<'_>, scale: f32) -> ([Vec<f32>; 3], Vec<Vec<f32>>) {
        let (problem, p) = (&self.problem, self.problem.forward());
        let rules = Rules::new(p, problem.params(), call.params, self.fault);
        let mut along: Vec<Vec<f32>> = problem.wrt().iter().map(|g| vec![0f32; problem.gradient_elements(&g.name) as usize]).collect();
        let (q, k, v) = (Dense::of(p.q(), call.q), Dense::of(p.k(), call.k), Dense::of(p.v(), call.v));
        let (o, d_o) = (Dense::of(p.o(), call.o), Dense::of(problem.d_o(), call.d_o));
        let [mut dq, mut dk, mut dv] =
            [problem.dq(), problem.dk(), problem.dv()].map(|t| vec![0f32; t.dims.iter().product::<i64>() as usize]);
        let (seq_q, seq_kv, dim_qk, dim_v) = (p.seq_q() as usize, p.seq_kv() as usize, p.dim_qk() as usize, p.dim_v() as usize);
        for n in 0..p.stats_elements() as usize {
            let (i, h) = (n % seq_q, n / seq_q);
            let (b, h) = (h / p.heads_q() as usize, h % p.heads_q() as usize);
            let kv = h / p.group() as usize;
            let (query, d_out) = (q.row([b, h, i]), d_o.row([b, h, i]));
            let delta = if self.fault == Fault::NoDelta { 0.0 } else { dot(d_out, o.row([b, h, i])) };
            let stats = if self.fault == Fault::NoStats { 4.0 } else { call.stats[n] };
            let of_sink = problem.wrt().iter().position(|g| p.sink() && g.name == SINK);
            let meets = (0..seq_kv).any(|j| rules.keeps([b, h, i, j].map(|n| n as i64)));
            if let (Some(at), true) = (of_sink, meets && stats != f32::NEG_INFINITY) {
                along[at][h] -= (sink_of(p, call.params, h) - stats).exp() * delta;
            }
            let lost = self.fault == Fault::OneHeadOfAGroup && (h + 1) % p.group() as usize != 0;
            for j in 0..seq_kv {
                let index = [b, h, i, j].map(|n| n as i64);
                if !rules.keeps(index) || (stats == f32::NEG_INFINITY && self.fault != Fault::EmptyRowsAreNan) {
                    if stats == f32::NEG_INFINITY && self.fault == Fault::EmptyRowsAreNan {
                        dq[n * dim_qk] = f32::NAN;
                    }
                    continue;
                }
                let key = k.row([b, kv, j]);
                let score = dot(query, key) * scale;
                let weight = (rules.modified(score, index) - stats).exp();
                let left = left(p, call.params, [b, h, i, j]);
                let d_modified = weight * (left * dot(d_out, v.row([b, kv, j])) - delta);
                let weight = left * weight;
                let d_s = match problem.gradient() {
                    Some(gradient) => {
                        let roots = rules.eval(&gradient.trace, score, d_modified, index);
                        for ((to, g), d) in along.iter_mut().zip(problem.wrt()).zip(&roots[2..]) {
                            let kind = problem.params().iter().find(|p| p.name == g.name).unwrap().kind;
                            if self.fault != Fault::OneBatchOfAParameter || b == 0 {
                                to[rules.element(kind, index)] += d;
                            }
                        }
                        for read in &gradient.reads {
                            let kind = problem.params().iter().find(|p| p.name == gradient.wrt[read.wrt]).unwrap().kind;
                            let to = problem.wrt().iter().position(|g| g.name == gradient.wrt[read.wrt]).unwrap();
                            if self.fault != Fault::OneBatchOfAParameter || b == 0 {
                                along[to][kind.within(roots[read.place] as i64)] += roots[read.value];
                            }
                        }
                        if self.fault == Fault::NoSlope { d_modified } else { roots[1] }
                    }
                    None => d_modified,
                };
                let step = |fault| if self.fault == fault { DType::BF16 } else { p.dtype() };
                let (weight, d_s) = (narrow(step(Fault::CoarseWeights), weight), narrow(step(Fault::CoarseScores), d_s));
                let d_s = if self.fault == Fault::NoScale { d_s } else { d_s * scale };
                add(&mut dq[n * dim_qk..][..dim_qk], d_s, key);
                let at = (b * p.heads_kv() as usize + kv) * seq_kv + j;
                if !lost {
                    add(&mut dk[at * dim_qk..][..dim_qk], d_s, query);
                    add(&mut dv[at * dim_v..][..dim_v], weight, d_out);
                }
            }
        }
        ([dq, dk, dv], along)
    }
}

impl PreparedBackward for Ready<BackwardProblem> {
    fn backward(&self, mut call: HostBackward<'_>) -> Result<Report, Error> {
        let scale = call.check(&self.problem)?;
        let (mut all, along) = self.gradients(&call, scale);
        for (g, values) in self.problem.wrt().iter().zip(along).filter(|_| self.fault != Fault::NoParameters) {
            let to = call.gradients.iter_mut().find(|to| to.name == g.name).unwrap();
            values.into_iter().enumerate().for_each(|(at, value)| set(&mut to.data, at, value, false));
        }
        if self.fault == Fault::NeverTheSameBits {
            all[1][0] *= 1.0 + self.calls.fetch_add(1, Ordering::Relaxed) as f32 / 64.0;
        }
        let tensors = [self.problem.dq(), self.problem.dk(), self.problem.dv()];
        for ((tensor, values), to) in tensors.into_iter().zip(all).zip([&mut call.dq, &mut call.dk, &mut call.dv]) {
            if self.fault == Fault::WritesGaps {
                (0..to.len()).for_each(|at| set(to, at, 0.0, false));
            }
            let mut tensor = *tensor;
            if self.fault == Fault::IgnoresStrides {
                tensor.strides = Layout::Bhsd.strides(tensor.dims);
            }
            let [_, heads, seq, dim] = tensor.dims.map(|n| n as usize);
            for (n, value) in values.into_iter().enumerate() {
                let (row, d) = (n / dim, n % dim);
                if !(self.fault == Fault::LeavesTheLastRowOut && row % seq == seq - 1) {
                    let index = [row / seq / heads, row / seq % heads, row % seq, d];
                    set(to, place(&tensor, index), value, self.fault == Fault::AddsToWhatIsThere);
                }
            }
        }
        Ok(Report::default())
    }
}

const DRAW: Draw = Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed: 3 };

/// Masks, GQA, rows that attend to no key, gaps, gradients with strides of their own.
fn spec(dtype: DType) -> BackwardSpec {
    let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 40, seq_kv: 33, dim_qk: 24, dim_v: 16 };
    let mut spec = AttentionSpec::dense(dtype, shape, Layout::Bhsd).mask(Mask::causal_bottom_right()).backward().deterministic();
    for tensor in [&mut spec.dq, &mut spec.dk, &mut spec.dv] {
        let [b, h, s, d] = tensor.dims;
        tensor.strides = Layout::Bshd.strides([b, h, s, d + 3]);
    }
    spec
}

#[test]
fn the_runner_finds_every_fault() {
    for (fault, told) in [
        (Fault::RefusesWhatItMakes, "supports() refuses a problem that prepare() accepts"),
        (Fault::NoDelta, "of dq is"),
        (Fault::NoScale, "of dq is"),
        (Fault::NoMask, "of dq is"),
        (Fault::NoStats, "of dq is"),
        (Fault::OneHeadOfAGroup, "of dk is"),
        (Fault::CoarseWeights, "of dv is"),
        (Fault::CoarseScores, "of dq is"),
        (Fault::WritesGaps, "between the rows of dq was written"),
        (Fault::AddsToWhatIsThere, "of dq is NaN"),
        (Fault::LeavesTheLastRowOut, "of dq is NaN"),
        (Fault::IgnoresStrides, "between the rows of dq was written"),
        (Fault::EmptyRowsAreNan, "element 0 of dq is NaN, not 0e0 to 0.0e0"),
        (Fault::NeverTheSameBits, "other bits"),
    ] {
        for source in Source::ALL {
            // These faults round to bf16, which shows only in f32 results.
            let coarse = matches!(fault, Fault::CoarseWeights | Fault::CoarseScores);
            for dtype in if coarse { &[DType::F32][..] } else { &[DType::F32, DType::F16, DType::BF16] } {
                match run_backward(&spec(*dtype), &DRAW, source, &Naive(fault)) {
                    Outcome::Fail(how) => assert!(how.contains(told), "{fault:?}: {how}"),
                    Outcome::Pass(distance, _) => panic!("{fault:?} passed, {}{}: {}", dtype, source.suffix(), distance.told()),
                    Outcome::Skip(why) => panic!("{fault:?} was skipped: {why}"),
                }
            }
        }
    }
}

/// Score_mods, masks and gradients of the library: each fault shows in at least one pass.
#[test]
fn the_runner_finds_faults_of_score_mods_and_masks() {
    let cases = Case::all_library().unwrap();
    let small = |case: &&Case| case.shape.seq_q * case.shape.seq_kv < 10_000;
    let masked = |case: &Case, name: &str| case.mask.iter().any(|m| m.starts_with(name));
    let asks = |case: &Case, name: &str| case.backward.as_ref().is_some_and(|b| b.wrt.iter().any(|w| w.starts_with(name)));
    type Shows<'c> = &'c dyn Fn(&Case) -> bool;
    let has: [(Fault, Shows<'_>); 7] = [
        (Fault::NoRest, &|case| masked(case, "array:hqk")),
        // The last of several entries has length 0. A single entry's length may mask out nothing, or only keys that another mask removes already.
        (Fault::NoLengths, &|case| masked(case, "padding") && case.shape.batch > 1),
        (Fault::NoSlope, &|case| case.score_mod == ["softcap:2"]),
        (Fault::OnlyDefaults, &|case| case.library().unwrap().is_some_and(|l| l.bound.iter().any(|b| b.name == "cap"))),
        (Fault::OneElementForAll, &|case| case.score_mod == ["alibi-slopes"]),
        // A bias that is constant over keys has the gradient 0, because P does not depend on it.
        (Fault::OneBatchOfAParameter, &|case| {
            let over_keys = case.score_mod.iter().any(|m| m.starts_with("bias") && m.ends_with('k'));
            // The last entry of a padded case has no keys, so a parameter that is read from another entry makes no difference there.
            case.shape.batch > 1 && !masked(case, "padding") && ((over_keys && asks(case, "bias")) || asks(case, "slopes"))
        }),
        (Fault::NoParameters, &|case| asks(case, "bias") || asks(case, "cap")),
    ];
    for (fault, shows) in has {
        let mut found = 0;
        for case in cases.iter().filter(small).filter(|case| shows(case)) {
            let forward = matches!(run_case(case, &Naive(fault)), Outcome::Fail(_));
            let backward = matches!(run_backward_case(case, Source::Oracle, &Naive(fault)), Outcome::Fail(_));
            assert!(forward || backward, "{fault:?} passed: {}", case.name);
            found += 1;
        }
        assert!(found > 0, "there is no case for {fault:?}");
    }
}

/// The library's traces in f32 match its closures, and the tolerances are not far above their errors.
#[test]
fn tolerances_hold_with_score_mods_and_masks() {
    let mut worst = [0f64; 2];
    for case in Case::all_library().unwrap() {
        match run_case(&case, &Naive(Fault::None)) {
            Outcome::Pass(distance, _) => worst[0] = worst[0].max(distance.worst()),
            Outcome::Skip(how) | Outcome::Fail(how) => panic!("{}: {how}", case.name),
        }
        for source in Source::ALL {
            match run_backward_case(&case, source, &Naive(Fault::None)) {
                Outcome::Pass(distance, _) => {
                    println!("{}{}: {}", case.name, source.suffix(), distance.told());
                    worst[1] = worst[1].max(distance.worst());
                }
                Outcome::Skip(how) | Outcome::Fail(how) => panic!("{}{}: {how}", case.name, source.suffix()),
            }
        }
    }
    assert!(worst[0] > 0.2 && worst[1] > 0.2, "{worst:?}");
}

#[test]
fn an_unsupported_case_is_a_skip_that_must_be_excused() {
    let skipped = || run_backward(&spec(DType::F32), &DRAW, Source::Oracle, &Naive(Fault::Refuses));
    assert!(matches!(skipped(), Outcome::Skip(why) if why.contains("it is a fault")));
    assert!(matches!(skipped().skip_only_if(|| true, String::new), Outcome::Skip(_)));
    assert!(matches!(skipped().skip_only_if(|| false, || "again".to_owned()), Outcome::Fail(how) if how.ends_with("again")));
}

/// The rounding of a real executor stays within the tolerances, and is not far below them.
#[test]
fn tolerances_hold_and_are_not_loose() {
    let mut worst = [0f64; 2];
    let mut check = |name: &str, source: Source, outcome: Outcome<_>| match outcome {
        Outcome::Pass(distance, _) => {
            let distance: crate::compare::GradientDistance = distance;
            println!("{name}{}: {}", source.suffix(), distance.told());
            worst[(source == Source::Executor) as usize] = distance.worst().max(worst[(source == Source::Executor) as usize]);
        }
        Outcome::Skip(how) | Outcome::Fail(how) => panic!("{name}{}: {how}", source.suffix()),
    };
    for case in Case::all_backward().unwrap() {
        // Larger cases are meant for executors that split long sequences. Skip them.
        if case.shape.seq_q * case.shape.seq_kv > 50_000 {
            continue;
        }
        for source in Source::ALL {
            check(&case.name, source, run_backward_case(&case, source, &Naive(Fault::None)));
        }
    }
    for seed in 0..40 {
        let spec = random_padded_backward(&mut Random::new(seed), &[DType::F16, DType::BF16, DType::F32]);
        let source = Source::ALL[(seed % 2) as usize];
        check(&format!("seed {seed}"), source, run_backward(&spec, &DRAW, source, &Naive(Fault::None)));
    }
    assert!(worst[0] > 0.2, "{worst:?}");
}
