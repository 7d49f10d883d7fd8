//! Every instruction set of this machine against textbook attention in f64.
//!
//! Scores, P and sums are f32 here for all operand types: 16 bits affect the rounding of results only.

use super::CpuExecutor;
use super::element::Element;
use super::isa::Isa;
use half::{bf16, f16};
use sdpa_core::executor::{Executor, Report};
use sdpa_core::{
    Align, AttentionSpec, DType, Elements, ElementsMut, HostForward, Layout, Mask, Param, Problem, Shape, Statistic, TensorSpec,
};

/// A linear congruential generator.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }

    pub(super) fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    /// Returns a number evenly distributed over (-2, 2).
    pub(super) fn element(&mut self) -> f32 {
        (self.below(1 << 20) as f32 - 524_287.5) / 262_144.0
    }
}

/// Operands as f32 with NaN in the gaps; `get` and `set` take (batch, head, seq, dim).
pub(super) struct Tensor {
    pub(super) spec: TensorSpec,
    pub(super) data: Vec<f32>,
}

impl Tensor {
    pub(super) fn new(spec: &TensorSpec) -> Tensor {
        Tensor { spec: *spec, data: vec![f32::NAN; spec.extent().unwrap() as usize] }
    }

    pub(super) fn random(spec: &TensorSpec, dtype: DType, random: &mut Random) -> Tensor {
        let mut tensor = Tensor::new(spec);
        for index in indices(spec) {
            tensor.set(index, round(dtype, random.element()));
        }
        tensor
    }

    pub(super) fn at(&self, index: [usize; 4]) -> usize {
        index.iter().zip(self.spec.strides).map(|(i, stride)| i * stride as usize).sum()
    }

    pub(super) fn get(&self, index: [usize; 4]) -> f64 {
        f64::from(self.data[self.at(index)])
    }

    pub(super) fn set(&mut self, index: [usize; 4], x: f32) {
        let at = self.at(index);
        self.data[at] = x;
    }

    /// Returns the tensor for the oracle.
    pub(super) fn told(&self) -> sdpa_oracle::Tensor<'_> {
        sdpa_oracle::Tensor { numbers: &self.data, strides: self.spec.strides.map(|n| n as usize) }
    }

    /// Sets every element to NaN, so that any other number was written to a gap.
    pub(super) fn clear(&mut self) {
        indices(&self.spec.clone()).for_each(|index| self.set(index, f32::NAN));
    }
}

pub(super) fn indices(spec: &TensorSpec) -> impl Iterator<Item = [usize; 4]> + use<> {
    let [a, b, c, d] = spec.dims.map(|n| n as usize);
    (0..a * b * c * d).map(move |i| [i / d / c / b, i / d / c % b, i / d % c, i % d])
}

pub(super) fn round(dtype: DType, x: f32) -> f32 {
    if dtype == DType::F16 {
        f16::from_f32(x).to_f32()
    } else if dtype == DType::BF16 {
        bf16::from_f32(x).to_f32()
    } else {
        x
    }
}

/// Calls `call` with the oracle's form of a problem under these masks.
pub(super) fn told<T>(
    problem: &Problem,
    [q, k, v]: [&Tensor; 3],
    scale: f64,
    masks: &[sdpa_oracle::Mask<'_>],
    call: impl FnOnce(&sdpa_oracle::Problem<'_>) -> T,
) -> T {
    let extents = [
        problem.batch(),
        problem.heads_q(),
        problem.heads_q() / problem.group(),
        problem.seq_q(),
        problem.seq_kv(),
        problem.dim_qk(),
        problem.dim_v(),
    ];
    call(&sdpa_oracle::Problem {
        shape: extents.map(|n| n as usize),
        q: q.told(),
        k: k.told(),
        v: v.told(),
        element: sdpa_oracle::Element::F32,
        stored: stored(problem.dtype()),
        scale,
        masks,
        modify: None,
        sink: None,
        dropout: None,
        narrow: None,
        fixed_point: None,
    })
}

/// Returns the oracle's name of a result's type.
pub(super) fn stored(dtype: DType) -> sdpa_oracle::Element {
    if dtype == DType::F16 {
        sdpa_oracle::Element::F16
    } else if dtype == DType::BF16 {
        sdpa_oracle::Element::BF16
    } else {
        sdpa_oracle::Element::F32
    }
}

/// Returns the normalised masks for the oracle.
pub(super) fn kept(problem: &Problem) -> [sdpa_oracle::Mask<'_>; 1] {
    [sdpa_oracle::Mask::Rule(Box::new(|[.., q, k]| problem.region().keeps(q, k)))]
}

/// Converts elements to another type.
pub(super) fn narrowed<T: Element + Default>(from: &[f32]) -> Vec<T> {
    let mut to = vec![T::default(); from.len()];
    T::narrow(from, 1.0, &mut to);
    to
}

/// Converts elements to f32.
pub(super) fn widened<T: Element>(from: &[T]) -> Vec<f32> {
    let mut to = vec![0.0; from.len()];
    T::widen(from, &mut to);
    to
}

/// Row statistics in the order of [`Statistic::ALL`]; empty if not requested.
pub(super) type OfRows = [Vec<f32>; 3];

/// Returns row statistics for the oracle.
pub(super) fn of_rows<'a>(problem: &Problem, [stats, row_max, sum_exp]: &'a OfRows) -> sdpa_oracle::Statistics<'a> {
    let told = |statistic: Statistic, x: &'a Vec<f32>| problem.computes(statistic).then_some(x as &dyn sdpa_oracle::Numbers);
    sdpa_oracle::Statistics {
        stats: told(Statistic::Stats, stats),
        row_max: told(Statistic::RowMax, row_max),
        sum_exp: told(Statistic::SumExp, sum_exp),
        amax_s: None,
    }
}

/// Runs the executor over f32 copies in a pool of `threads`. Returns the output with its gaps, and row statistics.
fn forward(isa: Isa, threads: usize, problem: &Problem, inputs: [&Tensor; 3], scale: Option<f32>) -> (Tensor, OfRows, Report) {
    forward_with(isa, threads, problem, inputs, (scale, &[]))
}

/// Runs the executor with values of declared parameters.
pub(super) fn forward_with(
    isa: Isa,
    threads: usize,
    problem: &Problem,
    inputs: [&Tensor; 3],
    (scale, params): (Option<f32>, &[Param<'_>]),
) -> (Tensor, OfRows, Report) {
    let mut o = Tensor::new(problem.o());
    let elements = |statistic: Statistic| if problem.computes(statistic) { problem.stats_elements() as usize } else { 0 };
    let mut of_rows = Statistic::ALL.map(|statistic| vec![f32::NAN; elements(statistic)]);
    let [stats, row_max, sum_exp] = of_rows.each_mut().map(|x| Some(x.as_mut_slice()).filter(|x| !x.is_empty()));
    let prepared = CpuExecutor::with_isa(isa).prepare(problem).unwrap();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    macro_rules! call {
        ($variant:ident, $ty:ty) => {{
            let [q, k, v] = inputs.map(|t| narrowed::<$ty>(&t.data));
            let mut out = narrowed::<$ty>(&o.data);
            let report = pool.install(|| {
                prepared.forward(
                    HostForward::new(
                        Elements::$variant(&q),
                        Elements::$variant(&k),
                        Elements::$variant(&v),
                        ElementsMut::$variant(&mut out),
                    )
                    .statistics([stats, row_max, sum_exp])
                    .attn_scale(scale)
                    .params(params),
                )
            });
            o.data = widened(&out);
            report
        }};
    }
    let report = if problem.dtype() == DType::F16 {
        call!(F16, f16)
    } else if problem.dtype() == DType::BF16 {
        call!(BF16, bf16)
    } else {
        call!(F32, f32)
    };
    (o, of_rows, report.unwrap())
}

/// Compares a run with the oracle, element by element.
fn verify(isa: Isa, threads: usize, problem: &Problem, inputs: [&Tensor; 3], scale: Option<f32>) -> Report {
    let (mut o, statistics, report) = forward(isa, threads, problem, inputs, scale);
    let factor = f64::from(scale.unwrap_or(problem.default_scale()));
    let of_rows = of_rows(problem, &statistics);
    let distance = told(problem, inputs, factor, &kept(problem), |p| sdpa_oracle::check(p, o.told(), of_rows, &|_| ()));
    assert!(distance.passes(), "{isa:?}, {threads} threads, {problem:?}: {distance:?}");
    o.clear();
    assert!(o.data.iter().all(|x| x.is_nan()), "{isa:?}, {problem:?}: something was written between rows");
    report
}

/// Returns strides of the layout, with gaps after rows and after each longer axis.
pub(super) fn with_gaps(dims: [i64; 4], layout: Layout, random: &mut Random) -> TensorSpec {
    let order = match layout {
        Layout::Bhsd => [2, 1, 0],
        Layout::Bshd => [1, 2, 0],
        Layout::Sbhd => [1, 0, 2],
    };
    let mut spec = TensorSpec { dims, strides: [1; 4], alignment: 4 };
    let mut next = dims[3] + random.pick(&[0, 1, 5]);
    for axis in order {
        spec.strides[axis] = next;
        next = next * dims[axis] + random.pick(&[0, 3]);
    }
    spec
}

pub(super) fn masks(random: &mut Random, seq_kv: i64) -> Vec<Mask> {
    let align = random.pick(&[Align::TopLeft, Align::BottomRight]);
    let left = random.pick(&[None, Some(1), Some(2), Some(17), Some(64), Some(130)]);
    let right = random.pick(&[None, Some(0), Some(1), Some(31), Some(100)]);
    let prefix = Mask::prefix_lm(random.pick(&[0, 2, 5, 40, 70, seq_kv / 2]));
    match random.below(7) {
        0 => vec![],
        1 => vec![Mask::causal()],
        2 => vec![Mask::causal_bottom_right()],
        3 => vec![Mask::window(left, right, align)],
        4 => vec![prefix],
        5 => vec![prefix, Mask::window(left, random.pick(&[None, Some(90)]), align)],
        _ => vec![Mask::window(left, right, align), Mask::causal()],
    }
}

/// Marks windows at the lower right corner as aligned per sequence.
pub(super) fn at_ends(masks: &mut [Mask]) {
    for mask in masks {
        if let Mask::Window { align: align @ Align::BottomRight, .. } = mask {
            *align = Align::Ends;
        }
    }
}

pub(super) const LENGTHS: [i64; 13] = [1, 2, 3, 7, 31, 63, 64, 65, 127, 128, 129, 130, 257];
pub(super) const DIMS: [i64; 9] = [1, 5, 8, 40, 64, 72, 128, 129, 256];

fn random_case(isa: Isa, seed: u64) {
    let random = &mut Random(seed);
    let heads_kv = random.pick(&[1, 1, 2, 3]);
    let shape = Shape {
        batch: random.pick(&[1, 1, 2]),
        heads_q: heads_kv * random.pick(&[1, 1, 2, 3, 8]),
        heads_kv,
        seq_q: random.pick(&LENGTHS),
        seq_kv: random.pick(&LENGTHS),
        dim_qk: random.pick(&DIMS),
        dim_v: random.pick(&DIMS),
    };
    if shape.batch * shape.heads_q * shape.seq_q * shape.seq_kv * (shape.dim_qk + shape.dim_v) > 12_000_000 {
        return;
    }
    let dtype = random.pick(&[DType::F32, DType::F32, DType::F16, DType::BF16]);
    let mut spec = AttentionSpec::dense(dtype, shape, Layout::Bhsd);
    spec.masks = masks(random, shape.seq_kv);
    [spec.stats, spec.row_max, spec.sum_exp] = [2, 3, 3].map(|n| random.below(n) == 0);
    for tensor in [&mut spec.q, &mut spec.k, &mut spec.v, &mut spec.o] {
        let layout = random.pick(&[Layout::Bhsd, Layout::Bshd, Layout::Sbhd]);
        if random.below(2) == 0 {
            *tensor = with_gaps(tensor.dims, layout, random);
        } else {
            *tensor = TensorSpec::dense(tensor.dims, layout);
        }
    }
    if random.below(8) == 0 {
        spec.k.strides[0] = 0;
        spec.v.strides[1] = 0;
    }
    let problem = spec.validate().unwrap();
    let inputs = [problem.q(), problem.k(), problem.v()].map(|t| Tensor::random(t, dtype, random));
    let scale = random.pick(&[None, None, Some(0.25), Some(-0.7), Some(0.0), Some(3.0)]);
    let threads = random.pick(&[1, 2, 5]);
    verify(isa, threads, &problem, inputs.each_ref(), scale);
}

#[test]
fn forward_over_random_problems_agrees_with_the_oracle() {
    for isa in Isa::all() {
        for seed in 0..200 {
            random_case(isa, seed * 7919 + 1);
        }
    }
}

fn dense(shape: [i64; 7], masks: &[Mask]) -> AttentionSpec {
    let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] = shape;
    let mut spec =
        AttentionSpec::dense(DType::F32, Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v }, Layout::Bhsd).with_stats();
    spec.masks = masks.to_vec();
    spec
}

fn inputs(problem: &Problem) -> [Tensor; 3] {
    let random = &mut Random(3);
    [problem.q(), problem.k(), problem.v()].map(|t| Tensor::random(t, problem.dtype(), random))
}

#[test]
fn forward_with_keys_shared_between_threads_agrees_with_the_oracle() {
    // The shapes have fewer strips than threads, so that keys are split. Their group sizes select both kernels. Some masks leave pieces
    // empty.
    let shapes = [[1, 1, 1, 1, 4099, 128, 72], [1, 6, 2, 1, 2111, 64, 64], [1, 8, 1, 3, 1500, 40, 129], [1, 2, 2, 65, 1237, 64, 8]];
    let masks = [
        vec![],
        vec![Mask::causal_bottom_right()],
        vec![Mask::window(Some(700), Some(0), Align::BottomRight)],
        vec![Mask::causal()],
        vec![Mask::prefix_lm(601)],
    ];
    for isa in Isa::all() {
        for shape in shapes {
            for masks in &masks {
                let problem = dense(shape, masks).validate().unwrap();
                verify(isa, 5, &problem, inputs(&problem).each_ref(), None);
            }
        }
    }
}

#[test]
fn rows_without_a_key_are_zero_with_stats_of_minus_infinity() {
    for isa in Isa::all() {
        for group in [1, 2] {
            for (seq_q, seq_kv) in [(130, 65), (5, 2), (300, 7)] {
                let spec = dense([2, 2 * group, 2, seq_q, seq_kv, 40, 24], &[Mask::causal_bottom_right()]);
                let problem = spec.validate().unwrap();
                let inputs = inputs(&problem);
                verify(isa, 2, &problem, inputs.each_ref(), None);
                let (o, [stats, ..], _) = forward(isa, 2, &problem, inputs.each_ref(), None);
                let empty = (seq_q - seq_kv) as usize;
                for [b, h, s, c] in indices(problem.o()).filter(|index| index[2] < empty) {
                    assert_eq!(o.data[o.at([b, h, s, c])].to_bits(), 0, "{isa:?}");
                    assert_eq!(stats[(b * problem.heads_q() as usize + h) * seq_q as usize + s], f32::NEG_INFINITY, "{isa:?}");
                }
            }
        }
    }
}

#[test]
fn infinities_and_nan_stay_in_the_rows_that_attend_to_them() {
    let masks = [
        vec![],
        vec![Mask::causal()],
        vec![Mask::window(Some(9), Some(4), Align::BottomRight)],
        vec![Mask::prefix_lm(20), Mask::window(Some(30), None, Align::TopLeft)],
    ];
    for isa in Isa::all() {
        for shape in [[1, 2, 1, 150, 203, 33, 40], [1, 1, 1, 2, 70, 64, 64], [1, 2, 2, 90, 90, 16, 128]] {
            for masks in &masks {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let problem = dense(shape, masks).validate().unwrap();
                    let [mut q, mut k, mut v] = inputs(&problem);
                    k.set([0, 0, 61, 3], bad);
                    v.set([0, 0, 45, 7], bad);
                    v.set([0, 0, 64, 9], bad);
                    q.set([0, 0, 1, 2], bad);
                    verify(isa, 2, &problem, [&q, &k, &v], None);
                }
            }
        }
    }
}

#[test]
fn large_scores_do_not_overflow() {
    for isa in Isa::all() {
        for seq_q in [1, 70] {
            let problem = dense([1, 1, 1, seq_q, 150, 8, 8], &[]).validate().unwrap();
            let [q, mut k, v] = inputs(&problem);
            // Make one key dominate, so that P of the others is exactly 0.
            for index in indices(problem.k()) {
                k.set(index, 0.0);
            }
            for s in 0..seq_q as usize {
                assert!(q.get([0, 0, s, 0]) != 0.0);
            }
            k.set([0, 0, 77, 0], 1e30);
            let (o, _, _) = forward(isa, 1, &problem, [&q, &k, &v], None);
            for s in (0..seq_q as usize).filter(|&s| q.get([0, 0, s, 0]) > 0.0) {
                for c in 0..8 {
                    assert_eq!(o.get([0, 0, s, c]), v.get([0, 0, 77, c]), "{isa:?}");
                }
            }
            assert!(o.data.iter().all(|x| x.is_finite()), "{isa:?}");
        }
    }
}

#[test]
fn scratch_does_not_grow_with_the_lengths() {
    let bytes = |seq_q, seq_kv| {
        let problem = dense([1, 2, 2, seq_q, seq_kv, 32, 32], &[Mask::window(Some(5), Some(0), Align::TopLeft)]).validate().unwrap();
        let [q, k, v] = inputs(&problem);
        let (_, _, report) = forward(Isa::detect(), 2, &problem, [&q, &k, &v], None);
        report.workspace_bytes
    };
    let short = bytes(3000, 3000);
    assert_eq!(short, bytes(12_000, 3000));
    assert_eq!(short, bytes(3000, 12_000));
    assert!(short > 0 && short < 2 << 20, "{short}");
}
