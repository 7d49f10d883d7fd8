//! Rows whose every score is very low or very high but finite, as additive masks of -1e9 make them, against textbook attention in f64.

use crate::random::Random;
use half::{bf16, f16};
use sdpa::{
    AttentionSpec, BackwardSpec, DType, Elements, ElementsMut, Executor, HostBackward, HostForward, HostGradient, Layout, Mask, Param,
    SINK, Shape,
};
use sdpa_oracle::{Element, Given, Modify, Place, Problem, Rough, Tensor, attention, gradients};

/// The biases that make scores very low or very high: each is added to the scores of some rows or keys.
pub const ADDED: [f32; 10] = [-1e4, -1e9, 1e9, -1e10, -1e30, 1e30, f32::MIN, f32::MAX, 1e6, -700.0];

/// The scores to which the bias is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// Every score of each third row.
    Rows,
    /// The scores of the last keys. Rows of causal masks attend to none, some or all of these keys.
    Keys,
}

impl Where {
    /// Both selections of scores.
    pub const ALL: [Where; 2] = [Where::Rows, Where::Keys];

    fn holds(self, [_, _, q, k]: Place, from: i64) -> bool {
        match self {
            Where::Rows => q % 3 == 0,
            Where::Keys => k >= from,
        }
    }

    fn text(self, added: f32, from: i64) -> String {
        let condition = match self {
            Where::Rows => "q % 3 == 0".to_owned(),
            Where::Keys => format!("k >= {from}"),
        };
        format!("select({condition}, score + {added:?}, score)")
    }
}

/// The score_mod as a kernel computes it, in f32, and its derivative.
struct Added {
    added: f32,
    place: Where,
    from: i64,
}

impl Modify for Added {
    fn value(&self, score: Rough, at: Place, _: &mut Vec<Rough>) -> Rough {
        let holds = self.place.holds(at, self.from);
        Rough::exact(if holds { f64::from(score.value as f32 + self.added) } else { score.value })
    }

    fn slopes(&self, _: Rough, _: Place, _: &mut Vec<Rough>) -> Vec<Rough> {
        vec![Rough::exact(1.0)]
    }
}

/// The element types that have large scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Float {
    /// The element type f32.
    F32,
    /// The element type f16.
    F16,
    /// The element type bf16.
    BF16,
}

impl Float {
    /// Returns the floating-point type of an element type.
    ///
    /// # Panics
    /// The type is an integer or an 8-bit float.
    fn of(dtype: DType) -> Float {
        let all = [(DType::F32, Float::F32), (DType::F16, Float::F16), (DType::BF16, Float::BF16)];
        all.into_iter().find(|(of, _)| *of == dtype).map(|(_, float)| float).unwrap_or_else(|| panic!("{dtype} has no large scores"))
    }

    fn element(self) -> Element {
        match self {
            Float::F32 => Element::F32,
            Float::F16 => Element::F16,
            Float::BF16 => Element::BF16,
        }
    }
}

/// Numbers of an element type, and the numbers widened to f64.
struct Drawn {
    wide: Vec<f64>,
    f32: Vec<f32>,
    f16: Vec<f16>,
    bf16: Vec<bf16>,
    float: Float,
}

impl Drawn {
    fn new(random: &mut Random, float: Float, len: usize) -> Drawn {
        let numbers: Vec<f32> = (0..len).map(|_| random.normal() as f32).collect();
        Drawn::of(float, numbers)
    }

    fn nan(float: Float, len: usize) -> Drawn {
        Drawn::of(float, vec![f32::NAN; len])
    }

    fn of(float: Float, f32: Vec<f32>) -> Drawn {
        let f16 = f32.iter().map(|x| f16::from_f32(*x)).collect();
        let bf16 = f32.iter().map(|x| bf16::from_f32(*x)).collect();
        let mut drawn = Drawn { wide: Vec::new(), f32, f16, bf16, float };
        drawn.wide = drawn.widened();
        drawn
    }

    fn elements(&self) -> Elements<'_> {
        match self.float {
            Float::F16 => Elements::F16(&self.f16),
            Float::BF16 => Elements::BF16(&self.bf16),
            Float::F32 => Elements::F32(&self.f32),
        }
    }

    fn elements_mut(&mut self) -> ElementsMut<'_> {
        match self.float {
            Float::F16 => ElementsMut::F16(&mut self.f16),
            Float::BF16 => ElementsMut::BF16(&mut self.bf16),
            Float::F32 => ElementsMut::F32(&mut self.f32),
        }
    }

    fn widened(&self) -> Vec<f64> {
        match self.float {
            Float::F16 => self.f16.iter().map(|x| x.to_f64()).collect(),
            Float::BF16 => self.bf16.iter().map(|x| x.to_f64()).collect(),
            Float::F32 => self.f32.iter().map(|x| f64::from(*x)).collect(),
        }
    }
}

/// Checks that the norm of the error is at most `bound`, relative to the norm of `want`. Results must be finite exactly where `want` is.
fn near(what: &str, got: &[f64], want: &[f64], bound: f64) -> Result<(), String> {
    if let Some(at) = (0..want.len()).find(|&at| got[at].is_finite() != want[at].is_finite()) {
        return Err(format!("{what}: element {at} is {}, not {}", got[at], want[at]));
    }
    let norm = |x: &mut dyn Iterator<Item = f64>| x.filter(|x| x.is_finite()).map(|x| x * x).sum::<f64>().sqrt();
    let (off, size) = (norm(&mut got.iter().zip(want).map(|(x, y)| x - y)), norm(&mut want.iter().copied()));
    if off <= bound * size + 1e-30 { Ok(()) } else { Err(format!("{what}: off by {off:.2e}, of {size:.2e}")) }
}

/// Runs one problem with large scores: a forward pass with every row statistic, and then a backward pass from its results.
///
/// # Errors
/// Returns a message about the first mismatch.
#[allow(clippy::too_many_lines)]
pub fn large_scores(executor: &dyn Executor, dtype: DType, shape: Shape, place: Where, added: f32, sink: bool) -> Result<(), String> {
    let Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v } = shape;
    let (from, float) = (seq_kv / 2, Float::of(dtype));
    let said = |e: sdpa::Error| e.to_string();
    let mut spec = AttentionSpec::dense(dtype, shape, Layout::Bhsd).with_stats();
    if place == Where::Keys {
        spec = spec.mask(Mask::causal_bottom_right());
    }
    spec.score_mods = vec![place.text(added, from).parse().map_err(|e| format!("{e}"))?];
    if sink {
        spec = spec.with_sink();
    }
    let extents = [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v].map(|x| x as usize);
    let len = |heads: i64, rows: i64, dim: i64| (batch * heads * rows * dim) as usize;
    let random = &mut Random::new(added.to_bits().into());
    let q = Drawn::new(random, float, len(heads_q, seq_q, dim_qk));
    let k = Drawn::new(random, float, len(heads_kv, seq_kv, dim_qk));
    let v = Drawn::new(random, float, len(heads_kv, seq_kv, dim_v));
    let d_o = Drawn::new(random, float, len(heads_q, seq_q, dim_v));
    // Even heads have a sink near ordinary scores, odd heads one near large scores.
    let sinks: Vec<f32> = (0..heads_q).map(|head| if head % 2 == 0 { 0.5 } else { added }).collect();
    let params: Vec<Param<'_>> = if sink { vec![Param::new(SINK, &sinks)] } else { Vec::new() };

    let modify = Added { added, place, from };
    let causal = [sdpa_oracle::Mask::Window { left: None, right: Some(0), align: sdpa_oracle::Align::BottomRight }];
    let element = float.element();
    let textbook = Problem {
        shape: extents,
        q: Tensor::dense(&q.wide, [0, heads_q as usize, seq_q as usize, dim_qk as usize]),
        k: Tensor::dense(&k.wide, [0, heads_kv as usize, seq_kv as usize, dim_qk as usize]),
        v: Tensor::dense(&v.wide, [0, heads_kv as usize, seq_kv as usize, dim_v as usize]),
        element,
        stored: element,
        scale: 1.0 / (dim_qk as f64).sqrt(),
        masks: if place == Where::Keys { &causal } else { &[] },
        modify: Some(&modify),
        sink: if sink { Some(&sinks) } else { None },
        dropout: None,
        narrow: None,
        fixed_point: None,
    };
    let want = attention(&textbook);
    let bound = if dtype == DType::F32 { 1e-3 } else { 0.02 };

    let rows = (batch * heads_q * seq_q) as usize;
    let mut o = Drawn::nan(float, len(heads_q, seq_q, dim_v));
    let [mut stats, mut row_max, mut sum_exp] = [(); 3].map(|()| vec![f32::NAN; rows]);
    let told = spec.clone().with_row_max().with_sum_exp();
    let call = HostForward::new(q.elements(), k.elements(), v.elements(), o.elements_mut())
        .stats(&mut stats)
        .row_max(&mut row_max)
        .sum_exp(&mut sum_exp)
        .params(&params);
    let problem = told.validate().map_err(|e| e.to_string())?;
    executor.prepare(&problem).map_err(said)?.forward(call).map_err(said)?;
    near("o", &o.widened(), &want.o, bound)?;
    for (name, got, want) in [("stats", &stats, &want.stats), ("row_max", &row_max, &want.row_max), ("sum_exp", &sum_exp, &want.sum_exp)] {
        let got: Vec<f64> = got.iter().map(|x| f64::from(*x)).collect();
        near(name, &got, want, if name == "sum_exp" { 1e-3 } else { 1e-5 })?;
    }

    let upstream = Tensor::dense(&d_o.wide, [0, heads_q as usize, seq_q as usize, dim_v as usize]);
    let right = gradients(&textbook, upstream, Given::Rounded);
    let mut backward: BackwardSpec = spec.backward();
    if sink {
        backward = backward.wrt(SINK, DType::F32);
    }
    let mut dq = Drawn::nan(float, q.wide.len());
    let mut dk = Drawn::nan(float, k.wide.len());
    let mut dv = Drawn::nan(float, v.wide.len());
    let mut d_sink = vec![f32::NAN; heads_q as usize];
    let call = HostBackward::new(
        (q.elements(), k.elements(), v.elements()),
        (o.elements(), &stats),
        d_o.elements(),
        (dq.elements_mut(), dk.elements_mut(), dv.elements_mut()),
    )
    .params(&params)
    .gradients(if sink { vec![HostGradient::new(SINK, &mut d_sink)] } else { Vec::new() });
    let problem = backward.validate().map_err(|e| e.to_string())?;
    executor.prepare_backward(&problem).map_err(said)?.backward(call).map_err(said)?;
    near("dq", &dq.widened(), &right.dq.value, bound)?;
    near("dk", &dk.widened(), &right.dk.value, bound)?;
    near("dv", &dv.widened(), &right.dv.value, bound)?;
    if sink {
        // Compute P from the row sums: near 1e30 not even an f64 log-sum-exp can hold the logarithm of the number of keys.
        let mut want_sink = vec![0.0; heads_q as usize];
        // Compute delta from the rounded output, as the backward pass does: with few rows, the sink gradient is so small that this
        // rounding matters.
        let of_o = o.widened();
        for row in 0..rows {
            let head = row / seq_q as usize % heads_q as usize;
            let weight = (f64::from(sinks[head]) - want.row_max[row]).exp() / want.sum_exp[row];
            let of_row = row * dim_v as usize..(row + 1) * dim_v as usize;
            let delta: f64 = of_o[of_row.clone()].iter().zip(&d_o.wide[of_row]).map(|(o, d_o)| o * d_o).sum();
            want_sink[head] -= weight * delta;
        }
        let got: Vec<f64> = d_sink.iter().map(|x| f64::from(*x)).collect();
        near("d_sink", &got, &want_sink, bound)?;
    }
    Ok(())
}

/// Tiles of one and of several thread blocks, 2-CTA clusters, packed GQA tiles, split-KV.
const SHAPES: [Shape; 6] = [
    Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 70, seq_kv: 150, dim_qk: 64, dim_v: 64 },
    Shape { batch: 1, heads_q: 2, heads_kv: 2, seq_q: 150, seq_kv: 290, dim_qk: 128, dim_v: 128 },
    Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 130, seq_kv: 140, dim_qk: 192, dim_v: 128 },
    Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 70, seq_kv: 200, dim_qk: 256, dim_v: 256 },
    Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q: 1, seq_kv: 2100, dim_qk: 64, dim_v: 64 },
    Shape { batch: 1, heads_q: 4, heads_kv: 1, seq_q: 3, seq_kv: 1500, dim_qk: 128, dim_v: 64 },
];

/// One problem of [`large_scores`].
#[derive(Clone, Copy, Debug)]
pub struct LargeScores {
    /// The extents of the problem.
    pub shape: Shape,
    /// The element type of the problem.
    pub dtype: DType,
    /// The scores to which the bias is added.
    pub place: Where,
    /// The bias that makes scores large.
    pub added: f32,
    /// Whether the problem has attention sinks.
    pub sink: bool,
}

impl LargeScores {
    /// Returns problems with every shape and every bias. Their element types alternate, and a third of them have sinks.
    pub fn all(dtypes: &[DType]) -> Vec<LargeScores> {
        let mut all = Vec::new();
        for (n, shape) in SHAPES.into_iter().enumerate() {
            for (m, added) in ADDED.into_iter().enumerate() {
                for place in Where::ALL {
                    let dtype = dtypes[(n + m + usize::from(place == Where::Keys)) % dtypes.len()];
                    all.push(LargeScores { shape, dtype, place, added, sink: (n + m) % 3 == 1 });
                }
            }
        }
        all
    }

    /// Runs the problem on an executor.
    ///
    /// # Errors
    /// Fails as [`large_scores`] does.
    pub fn run(&self, executor: &dyn Executor) -> Result<(), String> {
        large_scores(executor, self.dtype, self.shape, self.place, self.added, self.sink)
    }
}
