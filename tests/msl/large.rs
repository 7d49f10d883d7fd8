//! Rows of scores that are very low or very high but finite, on every kernel: each cut of tiles, rows of a simdgroup, splits of the keys, sinks.
//! Masks, lengths and documents too: the sum that the backward pass computes again has to follow them.

use super::{NAME, emulation};
use conformance::msl::Emulated;
use conformance::random::Random;
use conformance::runner::{ADDED, Where, large_scores, side_by_side};
use conformance::say::say;
use conformance::share::{DAYS, of_today};
use metal_fallback::Kernels;
use sdpa::cpu::CpuExecutor;
use sdpa::{
    AttentionSpec, DROPOUT_OFFSET, DROPOUT_SEED, DType, Executor, HostBackward, HostForward, HostGradient, Layout, Packed, Param,
    ParamValue, SINK, ScoreMod, Shape,
};
use std::f32::consts::LN_2;
use std::ops::Range;
use std::sync::Mutex;

const fn shape(heads_q: i64, seq_q: i64, seq_kv: i64, dim_qk: i64, dim_v: i64) -> Shape {
    Shape { batch: 1, heads_q, heads_kv: heads_q / 2, seq_q, seq_kv, dim_qk, dim_v }
}

const SHAPES: [(Kernels, Shape); 10] = [
    (Kernels::Tiled, shape(4, 41, 70, 64, 64)),
    (Kernels::Tiled, shape(2, 37, 90, 128, 128)),
    (Kernels::Tiled, shape(2, 35, 45, 192, 128)),
    (Kernels::Tiled, shape(2, 19, 41, 256, 256)),
    (Kernels::Vector, shape(4, 4, 300, 64, 64)),
    (Kernels::Vector, shape(2, 3, 70, 128, 128)),
    (Kernels::Vector, shape(2, 5, 70, 192, 128)),
    (Kernels::Vector, shape(2, 4, 45, 256, 256)),
    (Kernels::Parts, shape(4, 1, 1100, 64, 64)),
    (Kernels::Parts, shape(2, 4, 600, 128, 64)),
];

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

#[derive(Clone, Copy)]
struct Drawn {
    kernels: Kernels,
    shape: Shape,
    dtype: DType,
    place: Where,
    added: f32,
    sink: bool,
}

fn all() -> Vec<Drawn> {
    let mut all = Vec::new();
    for (n, (kernels, shape)) in SHAPES.into_iter().enumerate() {
        for (m, added) in ADDED.into_iter().enumerate() {
            for place in Where::ALL {
                let dtype = DTYPES[(n + m + usize::from(place == Where::Keys)) % DTYPES.len()];
                all.push(Drawn { kernels, shape, dtype, place, added, sink: (n + m / 2) % 2 == 1 });
            }
        }
    }
    all
}

#[test]
fn large_scores_of_every_kernel() {
    let problems = of_today(&format!("large scores {NAME}"), 2 * DAYS, all(), |drawn| {
        let Drawn { kernels, shape, dtype, place, added, sink } = drawn;
        vec![format!("{kernels:?} {place:?} {sink}"), format!("{shape:?}"), format!("{kernels:?} {dtype:?}"), added.to_string()]
    });
    let Some(toolchain) = emulation(&format!("{} problems with large scores", problems.len())) else { return };
    let wrong = Mutex::new(Vec::new());
    side_by_side(&problems, |&Drawn { kernels, shape, dtype, place, added, sink }| {
        let emulated = Emulated::new(toolchain.clone(), added.to_bits().into()).forced(kernels).executor();
        if let Err(how) = large_scores(&emulated, dtype, shape, place, added, sink) {
            wrong.lock().unwrap().push(format!("{kernels:?} {dtype} {shape:?}, {added} to {place:?}, sink {sink}: {how}"));
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} of {} are wrong:\n{}", wrong.len(), problems.len(), wrong.join("\n"));
    say(&format!("large scores {NAME}: {} problems", problems.len()));
}

/// Operands of both passes, f32, and what a forward pass made of them.
struct Operands {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_o: Vec<f32>,
    o: Vec<f32>,
    stats: Vec<f32>,
}

impl Operands {
    /// Random ones, for so many rows of queries and of keys in all heads together.
    fn new(queries: i64, keys: i64, shape: Shape) -> Operands {
        let mut random = Random::new(29);
        let [q, d_o] = [shape.dim_qk, shape.dim_v].map(|dim| quarters(queries * dim, &mut random));
        let [k, v] = [shape.dim_qk, shape.dim_v].map(|dim| quarters(keys * dim, &mut random));
        Operands { o: vec![f32::NAN; d_o.len()], stats: vec![f32::NAN; queries as usize], q, k, v, d_o }
    }

    /// Makes rows of queries NaN, and rows of keys.
    fn spoil(&mut self, queries: &[Range<usize>], keys: &[Range<usize>], shape: Shape) {
        let [dim_qk, dim_v] = [shape.dim_qk, shape.dim_v].map(|dim| dim as usize);
        let fill = |tensor: &mut [f32], rows: &Range<usize>, dim: usize| tensor[rows.start * dim..rows.end * dim].fill(f32::NAN);
        for rows in queries {
            fill(&mut self.q, rows, dim_qk);
            [&mut self.d_o, &mut self.o].into_iter().for_each(|tensor| fill(tensor, rows, dim_v));
            fill(&mut self.stats, rows, 1);
        }
        for rows in keys {
            fill(&mut self.k, rows, dim_qk);
            fill(&mut self.v, rows, dim_v);
        }
    }

    fn forward(&mut self, executor: &dyn Executor, spec: &AttentionSpec, params: &[Param<'_>]) -> Result<(), String> {
        let call = HostForward::new(&self.q, &self.k, &self.v, &mut self.o).stats(&mut self.stats).attn_scale(SCALE).params(params);
        let prepared = executor.prepare(&spec.validate().map_err(|e| e.to_string())?).map_err(|e| e.to_string())?;
        prepared.forward(call).map(|_| ()).map_err(|e| e.to_string())
    }

    /// The gradients of queries, keys, values, the bias and sinks.
    fn gradients(&self, executor: &dyn Executor, spec: &AttentionSpec, params: &[Param<'_>]) -> Result<[Vec<f32>; 5], String> {
        let [mut dq, mut dk, mut dv] = [&self.q, &self.k, &self.v].map(|of| vec![f32::NAN; of.len()]);
        let [mut d_bias, mut d_sink] = [bias(spec).len(), SINKS.len()].map(|len| vec![f32::NAN; len]);
        let call = HostBackward::new((&self.q, &self.k, &self.v), (&self.o, &self.stats), &self.d_o, (&mut dq, &mut dk, &mut dv))
            .attn_scale(SCALE)
            .params(params)
            .gradients([HostGradient::new(BIAS, &mut d_bias), HostGradient::new(SINK, &mut d_sink)]);
        let problem = spec.backward().wrt(BIAS, DType::F32).wrt(SINK, DType::F32).validate().map_err(|e| e.to_string())?;
        let prepared = executor.prepare_backward(&problem).map_err(|e| e.to_string())?;
        prepared.backward(call).map_err(|e| e.to_string())?;
        Ok([dq, dk, dv, d_bias, d_sink])
    }
}

/// Checks that results are so many times those of another, and not all zeros.
fn near(what: &str, got: &[f32], want: &[f32], times: f32, bound: f32) -> Result<(), String> {
    let is_near = |at: usize| (got[at] - times * want[at]).abs() <= bound * (1.0 + want[at].abs());
    if let Some(at) = (0..want.len()).find(|&at| !is_near(at)) {
        return Err(format!("{what}: element {at} is {}, not {times} times {}", got[at], want[at]));
    }
    want.iter().any(|x| x.abs() > 0.01).then_some(()).ok_or_else(|| format!("{what}: nothing but zeros"))
}

const BIAS: &str = "bias";
const NAMES: [&str; 5] = ["dq", "dk", "dv", "d_bias", "d_sink"];
/// For each key head one that leaves large rows their keys; the others take all of rows with low scores.
const SINKS: [f32; 4] = [f32::NEG_INFINITY, 2.0, f32::MIN, -1.0];
/// Low scores, the lowest, which kernels give to keys that are masked out too, and high ones that still differ. Next to 3000 an f32 log-sum-exp
/// is off by up to 1.2e-4.
const ADDED_TO_ROWS: [f32; 4] = [-1e9, f32::MIN, 1e6, 3e3];
/// Quarters times this are exact, so that scores round alike in every order of their sums.
const SCALE: Option<f32> = Some(0.25);

fn quarters(len: i64, random: &mut Random) -> Vec<f32> {
    (0..len).map(|_| (random.normal() as f32 * 4.0).round() / 4.0).collect()
}

fn param<'a>(name: &'a str, value: ParamValue<'a>) -> Param<'a> {
    Param::new(name, value)
}

/// A bias over heads, queries and keys.
fn bias(spec: &AttentionSpec) -> Vec<f32> {
    quarters(spec.q.dims[1] * spec.q.dims[2] * spec.k.dims[2], &mut Random::new(31))
}

/// The sinks and the bias, after other parameters.
fn with_floats<'a>(params: &[Param<'a>], bias: &'a [f32]) -> Vec<Param<'a>> {
    [params, &[param(SINK, ParamValue::F32(&SINKS)), param(BIAS, ParamValue::F32(bias))]].concat()
}

/// Both passes against those of the CPU executor; what `spoil` makes NaN is not read.
fn as_on_cpu(
    executor: &dyn Executor,
    spec: &AttentionSpec,
    mut operands: Operands,
    params: &[Param<'_>],
    spoil: impl Fn(&mut Operands),
) -> Result<(), String> {
    let cpu = CpuExecutor::default();
    let bias = bias(spec);
    let params = &with_floats(params, &bias);
    operands.forward(&cpu, spec, params)?;
    let want = operands.gradients(&cpu, spec, params)?;
    spoil(&mut operands);
    let got = operands.gradients(executor, spec, params)?;
    let right = std::mem::take(&mut operands.o);
    operands.o = vec![f32::NAN; right.len()];
    operands.forward(executor, spec, params)?;
    let read: Vec<usize> = (0..right.len()).filter(|&at| !right[at].is_nan()).collect();
    let of = |o: &[f32]| read.iter().map(|&at| o[at]).collect::<Vec<f32>>();
    near("o", &of(&operands.o), &of(&right), 1.0, 2e-5)?;
    NAMES.into_iter().zip(got.iter().zip(&want)).try_for_each(|(name, (got, want))| near(name, got, want, 1.0, 2e-5))
}

fn masked_shape(seq_q: i64) -> Shape {
    Shape { batch: 3, heads_q: 4, heads_kv: 2, seq_q, seq_kv: 41, dim_qk: 20, dim_v: 12 }
}

fn added(to_rows: f32) -> ScoreMod {
    format!("tensor bias[head, q, k]: f32; select(q % 3 == 0, score + bias + {to_rows:?}, score + bias)").parse().unwrap()
}

fn dense(seq_q: i64, to_rows: f32, masks: &[&str]) -> AttentionSpec {
    let spec = AttentionSpec::dense(DType::F32, masked_shape(seq_q), Layout::Bhsd).with_sink().with_stats();
    masks.iter().fold(spec.score_mod(added(to_rows)), |spec, mask| spec.mask(mask.parse().unwrap()))
}

fn rows(shape: Shape) -> Operands {
    Operands::new(shape.batch * shape.heads_q * shape.seq_q, shape.batch * shape.heads_kv * shape.seq_kv, shape)
}

fn with_lengths(executor: &dyn Executor, seq_q: i64, to_rows: f32) -> Result<(), String> {
    let shape = masked_shape(seq_q);
    let lengths = [[seq_q as i32, seq_q as i32 - 1, 2], [41, 30, 5]];
    let past = |lengths: [i32; 3], heads: i64, seq: i64| -> Vec<Range<usize>> {
        let rows = (0..shape.batch * heads).map(|n| (n * seq + i64::from(lengths[(n / heads) as usize]))..(n + 1) * seq);
        rows.map(|rows| rows.start as usize..rows.end as usize).collect()
    };
    let params = [param("seq_len_q", ParamValue::I32(&lengths[0])), param("seq_len_kv", ParamValue::I32(&lengths[1]))];
    let spoil = |operands: &mut Operands| {
        operands.spoil(&past(lengths[0], shape.heads_q, seq_q), &past(lengths[1], shape.heads_kv, shape.seq_kv), shape);
    };
    as_on_cpu(executor, &dense(seq_q, to_rows, &["padding", "window:13,5:ends"]), rows(shape), &params, spoil)
}

fn with_dropout(executor: &dyn Executor, seq_q: i64, to_rows: f32) -> Result<(), String> {
    // Keys that are masked out have the largest scores.
    let high = "select(k % 3 == 1, score + 1000000000.0, score)".parse().unwrap();
    let spec = dense(seq_q, to_rows, &["k % 3 != 1"]).score_mod(high).with_dropout(0.3);
    let params = [(DROPOUT_SEED, &[7]), (DROPOUT_OFFSET, &[16])].map(|(name, number)| param(name, ParamValue::I64(number)));
    as_on_cpu(executor, &spec, rows(masked_shape(seq_q)), &params, |_| ())
}

fn of_documents(executor: &dyn Executor, seq_q: i64, to_rows: f32) -> Result<(), String> {
    let shape = masked_shape(seq_q);
    let of_q = [0, seq_q as i32, seq_q as i32 + 2, 2 * seq_q as i32 + 1];
    let of_k = [0, 20, 29, 70];
    let packed = Packed::new().with_cross(true).with_totals(Some(of_q[3].into()), Some(of_k[3].into()));
    let spec = AttentionSpec::packed(DType::F32, shape, packed).with_sink().with_stats();
    let spec = spec.score_mod(added(to_rows)).mask("causal-ends".parse().unwrap());
    let params = [param("cu_seqlens_q", ParamValue::I32(&of_q)), param("cu_seqlens_kv", ParamValue::I32(&of_k))];
    let operands = Operands::new(i64::from(of_q[3]) * shape.heads_q, i64::from(of_k[3]) * shape.heads_kv, shape);
    as_on_cpu(executor, &spec, operands, &params, |_| ())
}

/// Statistics merged over two splits of the keys that weigh the same: P is half of this split's own, as near as f32 has `LN_2` next to what is added.
fn merged(executor: &dyn Executor, seq_q: i64, (added, bound): (f32, f32)) -> Result<(), String> {
    let shape = masked_shape(seq_q);
    let mut spec = dense(seq_q, 0.0, &[]);
    spec.score_mods = vec![format!("tensor bias[head, q, k]: f32; score + bias + {added:?}").parse().unwrap()];
    let bias = bias(&spec);
    let params = with_floats(&[], &bias);
    let mut operands = rows(shape);
    operands.forward(&CpuExecutor::default(), &spec, &params)?;
    let [want @ .., _] = operands.gradients(executor, &spec, &params)?;
    operands.stats.iter_mut().for_each(|stat| *stat += LN_2);
    let got = operands.gradients(executor, &spec, &params)?;
    NAMES.into_iter().zip(got.iter().zip(&want)).try_for_each(|(name, (got, want))| near(name, got, want, 0.5, bound))
}

/// Checks large scores alone, with masks, lengths, dropout and documents, and with merged statistics.
///
/// # Errors
/// The message of the first mismatch.
pub(super) fn hold(executor: &dyn Executor, kernels: Kernels) -> Result<(), String> {
    let seq_q = if kernels == Kernels::Tiled { 20 } else { 4 };
    let seq_kv = if kernels == Kernels::Parts { 600 } else { 41 };
    let with_keys = [
        (DType::F32, -1e9, Where::Rows, false),
        (DType::F32, 1e6, Where::Rows, false),
        (DType::F16, f32::MIN, Where::Rows, true),
        (DType::BF16, f32::MAX, Where::Keys, true),
    ];
    for (dtype, added, place, sink) in with_keys {
        large_scores(executor, dtype, shape(4, seq_q, seq_kv, 20, 12), place, added, sink)?;
    }
    for to_rows in ADDED_TO_ROWS {
        with_lengths(executor, seq_q, to_rows).map_err(|e| format!("lengths, {to_rows}: {e}"))?;
        with_dropout(executor, seq_q, to_rows).map_err(|e| format!("dropout, {to_rows}: {e}"))?;
        of_documents(executor, seq_q, to_rows).map_err(|e| format!("documents, {to_rows}: {e}"))?;
    }
    [(4e3, 1e-3), (1e6, 0.05)]
        .into_iter()
        .try_for_each(|added| merged(executor, seq_q, added).map_err(|e| format!("merged statistics, {added:?}: {e}")))
}

#[test]
fn large_scores_with_masks_lengths_and_documents() {
    let Some(toolchain) = emulation("large scores with masks") else { return };
    side_by_side(&Kernels::ALL, |&kernels| {
        hold(&Emulated::new(toolchain.clone(), 3).forced(kernels).executor(), kernels).unwrap_or_else(|e| panic!("{kernels:?}: {e}"));
    });
}
