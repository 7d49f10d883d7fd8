//! Sinks that the cases do not draw: far from scores; and the rows that their gradient leaves out.

use super::emulation;
use conformance::msl::Emulated;
use conformance::random::Random;
use half::{bf16, f16};
use metal_fallback::Kernels;
use sdpa::cpu::CpuExecutor;
use sdpa::{
    AttentionSpec, BackwardProblem, DType, ElementsMut, Executor, HostBackward, HostForward, HostGradient, Layout, Param, ParamValue, SINK,
    Shape,
};

const SHAPE: Shape = Shape { batch: 3, heads_q: 4, heads_kv: 2, seq_q: 90, seq_kv: 41, dim_qk: 20, dim_v: 44 };

fn normal(n: i64, random: &mut Random) -> Vec<f32> {
    (0..n).map(|_| random.normal() as f32).collect()
}

fn param<'a>(name: &'a str, value: ParamValue<'a>) -> Param<'a> {
    Param::new(name, value)
}

/// The output and stats of random operands; the last of many queries keep no key.
fn forward(executor: &dyn Executor, shape: Shape, sinks: &[f32]) -> Result<[Vec<f32>; 2], String> {
    let mask = "window:9,0".parse().unwrap();
    let spec = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).mask(mask).with_sink().with_stats();
    let mut random = Random::new(5);
    let Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v } = shape;
    let q = normal(batch * heads_q * seq_q * dim_qk, &mut random);
    let [k, v] = [dim_qk, dim_v].map(|dim| normal(batch * heads_kv * seq_kv * dim, &mut random));
    let mut o = vec![f32::NAN; (batch * heads_q * seq_q * dim_v) as usize];
    let mut stats = vec![f32::NAN; (batch * heads_q * seq_q) as usize];
    let params = [param(SINK, ParamValue::F32(sinks))];
    let call = HostForward::new(&q, &k, &v, &mut o).stats(&mut stats).params(&params);
    let prepared = executor.prepare(&spec.validate().map_err(|e| e.to_string())?).map_err(|e| e.to_string())?;
    prepared.forward(call).map_err(|e| e.to_string())?;
    Ok([o, stats])
}

/// Of the size of scores; that a sum of exponentials would overflow by or vanish in; that no score comes near; none.
const SIZES: [[f32; 4]; 3] = [[0.5, -3.0, 2.0, 0.0], [f32::NEG_INFINITY, -1000.0, 300.0, 1e30], [1e30, 300.0, -1e30, f32::MIN]];

/// Whether output and stats are those of the CPU, whatever the sinks are.
///
/// # Errors
/// Which is not.
pub(super) fn denominators(executor: &dyn Executor, seq_q: i64) -> Result<(), String> {
    let shape = Shape { seq_q, ..SHAPE };
    for sinks in SIZES {
        let [o, stats] = forward(executor, shape, &sinks)?;
        let [wanted, wanted_stats] = forward(&CpuExecutor::default(), shape, &sinks)?;
        let near = |x: f32, y: f32| x == y || (y.is_finite() && (x - y).abs() <= 1e-5 * (1.0 + y.abs()));
        for (at, (&x, &y)) in o.iter().zip(&wanted).enumerate() {
            near(x, y).then_some(()).ok_or_else(|| format!("o[{at}] is {x}, not {y}: {sinks:?}"))?;
        }
        for (at, (&x, &y)) in stats.iter().zip(&wanted_stats).enumerate() {
            // A row without keys stays one; on the CPU its stats are the sink.
            let keyless = at as i64 % seq_q - 9 >= shape.seq_kv - 1;
            let y = if keyless { f32::NEG_INFINITY } else { y };
            near(x, y).then_some(()).ok_or_else(|| format!("stats[{at}] are {x}, not {y}: {sinks:?}"))?;
        }
    }
    Ok(())
}

#[test]
fn sinks_of_every_size_stand_in_the_denominator_once() {
    let Some(toolchain) = emulation("sinks of every size") else { return };
    for (kernels, seq_q) in [(Kernels::Tiled, SHAPE.seq_q), (Kernels::Vector, 7), (Kernels::Parts, 7), (Kernels::Vector, SHAPE.seq_q)] {
        let emulated = Emulated::new(toolchain.clone(), 1).forced(kernels).executor();
        denominators(&emulated, seq_q).unwrap_or_else(|e| panic!("{kernels:?}: {e}"));
    }
}

/// Operands of a backward pass that are what they like: no forward pass has made them.
struct Given {
    o: Vec<f32>,
    d_o: Vec<f32>,
    stats: Vec<f32>,
}

const LENGTHS: [[i32; 3]; 2] = [[90, 13, 60], [41, 30, 5]];
const SINKS: [f32; 4] = [0.5, -3.0, f32::NEG_INFINITY, 2.0];

/// How a row attends to nothing, if it does.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Row {
    Attends,
    /// By lengths or the band.
    Outside,
    /// By stats; a rule or a score_mod has left it no key.
    Stats,
    /// The same, of an executor whose stats are the sink then: the output says so.
    Output,
}

impl Row {
    fn at(batch: usize, query: usize) -> Row {
        let [queries, keys] = LENGTHS.map(|lengths| lengths[batch] as usize);
        let is_kept = |key: usize| key <= query && key + 9 > query;
        match query % 7 {
            _ if query >= queries || !(0..keys).any(is_kept) => Row::Outside,
            3 => Row::Stats,
            5 => Row::Output,
            _ => Row::Attends,
        }
    }
}

/// Each row of (batch, head, query), in order.
fn rows() -> impl Iterator<Item = (usize, Row)> {
    let Shape { batch, heads_q, seq_q, .. } = SHAPE;
    let of = move |n: i64| (n / seq_q % heads_q, n / seq_q / heads_q, n % seq_q);
    (0..batch * heads_q * seq_q).map(of).map(|(head, batch, query)| (head as usize, Row::at(batch as usize, query as usize)))
}

impl Given {
    /// What rows that attend to nothing hold is `odd`, as far as nothing else says that they do.
    fn new(odd: f32) -> Given {
        let mut random = Random::new(11);
        let dim = SHAPE.dim_v as usize;
        let n = SHAPE.batch * SHAPE.heads_q * SHAPE.seq_q;
        let [mut o, mut d_o] = [(); 2].map(|()| normal(n * SHAPE.dim_v, &mut random));
        let mut stats: Vec<f32> = rows().zip(normal(n, &mut random)).map(|((head, _), x)| SINKS[head].max(0.0) + x.abs()).collect();
        for (n, (head, row)) in rows().enumerate() {
            let (of_o, of_stats) = match row {
                Row::Attends => continue,
                Row::Outside => (odd, odd),
                Row::Stats => (odd, f32::NEG_INFINITY),
                Row::Output => (0.0, SINKS[head]),
            };
            o[n * dim..][..dim].fill(of_o);
            d_o[n * dim..][..dim].fill(odd);
            stats[n] = of_stats;
        }
        Given { o, d_o, stats }
    }

    /// The gradient as it is defined, and how much is added up.
    fn gradient(&self) -> [[f64; 2]; 4] {
        let mut sums = [[0.0; 2]; 4];
        let dim = SHAPE.dim_v as usize;
        for (n, (head, _)) in rows().enumerate().filter(|(_, (_, row))| *row == Row::Attends) {
            let of_row = |x: &[f32]| x[n * dim..][..dim].iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
            let weight = (f64::from(SINKS[head]) - f64::from(self.stats[n])).exp();
            let products = of_row(&self.o).into_iter().zip(of_row(&self.d_o)).map(|(x, y)| weight * x * y);
            for product in products {
                sums[head] = [sums[head][0] - product, sums[head][1] + product.abs()];
            }
        }
        sums
    }
}

fn problem(dtype: DType) -> BackwardProblem {
    let masks = ["window:9,0", "padding"].map(|mask| mask.parse().unwrap());
    let spec = AttentionSpec::dense(DType::F32, SHAPE, Layout::Bhsd).with_sink().with_stats();
    let spec = masks.into_iter().fold(spec, AttentionSpec::mask);
    spec.backward().wrt(SINK, dtype).validate().unwrap()
}

/// The gradient of the sinks, into `data`.
fn backward(executor: &dyn Executor, given: &Given, data: ElementsMut<'_>) -> Result<(), String> {
    let problem = problem(data.dtype());
    let forward = problem.forward();
    let [q, k, v] = [forward.q(), forward.k(), forward.v()].map(|t| vec![0.0f32; t.dims.iter().product::<i64>() as usize]);
    let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(Clone::clone);
    let [seq_len_q, seq_len_kv] = &LENGTHS;
    let params = [
        param("seq_len_q", ParamValue::I32(seq_len_q)),
        param("seq_len_kv", ParamValue::I32(seq_len_kv)),
        param(SINK, ParamValue::F32(&SINKS)),
    ];
    let call = HostBackward::new((&q, &k, &v), (&given.o, &given.stats), &given.d_o, (&mut dq, &mut dk, &mut dv))
        .params(&params)
        .gradients([HostGradient::new(SINK, data)]);
    let prepared = executor.prepare_backward(&problem).map_err(|e| e.to_string())?;
    prepared.backward(call).map(|_| ()).map_err(|e| e.to_string())
}

/// Whether the gradient is what it is defined as, whatever rows that attend to nothing hold, and rounded to its type; its bits.
///
/// # Errors
/// What is not so.
pub(super) fn gradients(executor: &dyn Executor) -> Result<[u32; 4], String> {
    let of = |given: &Given| {
        let mut got = [f32::NAN; 4];
        backward(executor, given, ElementsMut::F32(&mut got)).map(|()| got)
    };
    let mut given = Given::new(0.0);
    let clean = of(&given)?;
    for (head, (got, [wanted, size])) in clean.into_iter().zip(given.gradient()).enumerate() {
        let near = (f64::from(got) - wanted).abs() <= 1e-6 * size;
        near.then_some(()).ok_or_else(|| format!("of head {head} it is {got}, not {wanted}"))?;
    }
    let bits = clean.map(f32::to_bits);
    for odd in [f32::NAN, f32::INFINITY, 1e30] {
        let got = of(&Given::new(odd))?;
        (got.map(f32::to_bits) == bits).then_some(()).ok_or_else(|| format!("{got:?} beside {odd}, not {clean:?}"))?;
    }
    let (mut halves, mut shorts) = ([f16::NAN; 4], [bf16::NAN; 4]);
    backward(executor, &given, ElementsMut::F16(&mut halves))?;
    backward(executor, &given, ElementsMut::BF16(&mut shorts))?;
    let rounded = (halves, shorts) == (clean.map(f16::from_f32), clean.map(bf16::from_f32));
    rounded.then_some(()).ok_or_else(|| format!("{halves:?} and {shorts:?}, not {clean:?}"))?;
    // A row that attends to something says so.
    let (attends, _) = rows().enumerate().find(|(_, (_, row))| *row == Row::Attends).ok_or("no row attends to anything")?;
    given.d_o[attends * SHAPE.dim_v as usize] = f32::NAN;
    let got = of(&given)?;
    (got.map(f32::is_nan) == [true, false, false, false]).then_some(()).ok_or_else(|| format!("{got:?} of not-a-number in head 0"))?;
    Ok(bits)
}

#[test]
fn rows_that_attend_to_nothing_add_nothing_to_its_gradient() {
    let Some(toolchain) = emulation("gradients of sinks") else { return };
    for row in [Row::Attends, Row::Outside, Row::Stats, Row::Output] {
        assert!(rows().filter(|(_, of)| *of == row).count() > 20, "{row:?}");
    }
    for kernels in [Kernels::Tiled, Kernels::Vector] {
        // In another order of threadgroups and simdgroups too.
        let of = |seed| {
            let emulated = Emulated::new(toolchain.clone(), seed).forced(kernels).executor();
            gradients(&emulated).unwrap_or_else(|e| panic!("{kernels:?}: {e}"))
        };
        assert_eq!(of(1), of(2), "{kernels:?}");
    }
}
