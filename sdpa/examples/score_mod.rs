//! Trains through a custom score_mod: a small attention layer learns the function of another one.
//!
//! `cargo run --release --example score_mod [cpu|cudnn]` prints the loss as it falls. Only the score_mod and its parameter's gradient are special;
//! projections and the optimiser are plain loops.

use sdpa::expr::{Axis, F32};
use sdpa::{
    AttentionSpec, DType, Dispatcher, ExecutorName, HostBackward, HostForward, HostGradient, Layout, Mask, Param, Preference, ScoreMod,
    Shape,
};

const SHAPE: Shape = Shape { batch: 4, heads_q: 4, heads_kv: 4, seq_q: 65, seq_kv: 65, dim_qk: 16, dim_v: 16 };
const HEADS: usize = 4;
const FEATURES: usize = 24;
const TOKENS: usize = 4 * 65;
const WIDTH: usize = HEADS * 16;
const STEPS: usize = 150;

/// The parameters of the layer: projections for q, k and v, (features, heads · dim), and a rate of decay per head.
struct Layer {
    weights: [Vec<f32>; 3],
    rate: Vec<f32>,
}

/// q, k and v; o; stats.
type Attended = ([Vec<f32>; 3], Vec<f32>, Vec<f32>);

/// Returns `n` uniform random numbers between −1 and 1.
fn random(n: usize, seed: &mut u64) -> Vec<f32> {
    let mut next = || {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn layer(seed: &mut u64, rate: f32) -> Layer {
    Layer { weights: std::array::from_fn(|_| random(FEATURES * WIDTH, seed)), rate: vec![rate; HEADS] }
}

/// Returns `a · b`, of shapes (rows, inner) and (inner, columns).
fn product(a: &[f32], b: &[f32], inner: usize, columns: usize) -> Vec<f32> {
    let mut c = vec![0.0; a.len() / inner * columns];
    for (a, c) in a.chunks_exact(inner).zip(c.chunks_exact_mut(columns)) {
        for (x, b) in a.iter().zip(b.chunks_exact(columns)) {
            c.iter_mut().zip(b).for_each(|(c, b)| *c += x * b);
        }
    }
    c
}

/// Returns `aᵀ · b`, of shapes (rows, m) and (rows, n).
fn transposed_product(a: &[f32], b: &[f32], m: usize, n: usize) -> Vec<f32> {
    let mut c = vec![0.0; m * n];
    for (a, b) in a.chunks_exact(m).zip(b.chunks_exact(n)) {
        for (x, c) in a.iter().zip(c.chunks_exact_mut(n)) {
            c.iter_mut().zip(b).for_each(|(c, b)| *c += x * b);
        }
    }
    c
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let executor = std::env::args().nth(1);
    let preference = match executor.as_deref() {
        None => Preference::Auto,
        Some("cpu") => Preference::Named(ExecutorName::CPU),
        Some("cudnn") => Preference::Named(ExecutorName::CUDNN),
        Some(other) => return Err(format!("{other:?} is neither cpu nor cudnn").into()),
    };

    // The score_mod bounds scores, and decreases them with distance at a rate that each head learns.
    let decay = ScoreMod::new("decay", |score, at, p| {
        let cap = p.scalar("cap", 8.0);
        let rate = p.tensor("rate", [Axis::Head], F32);
        (score / cap).tanh() * cap - rate * (at.q - at.k).to_f32()
    })?;

    // The layout is bshd: a token's heads are adjacent, as projections write them. cuDNN supports 16-bit operands, the CPU f32.
    let dispatcher = Dispatcher::default();
    let spec = |dtype| AttentionSpec::dense(dtype, SHAPE, Layout::Bshd).score_mod(decay.clone()).mask(Mask::causal()).with_stats();
    let (mut forward_spec, mut wrt) = (spec(DType::F32), vec!["rate"]);
    if preference == Preference::Named(ExecutorName::CUDNN) {
        // cuDNN's engines cannot compute the gradient of the rate, so it stays constant there.
        (forward_spec, wrt) = (spec(DType::BF16), Vec::new());
    }
    let backward_spec = wrt.iter().fold(forward_spec.backward(), |spec, name| spec.wrt(name, DType::F32));
    let forward = dispatcher.prepare(&forward_spec.validate()?, preference)?;
    let backward = dispatcher.prepare_backward(&backward_spec.validate()?, preference)?;
    println!("forward on {}, backward on {}", forward.executor, backward.executor);
    let narrow = forward_spec.dtype == DType::BF16;

    let mut seed = 1;
    let (teacher, mut student) = (layer(&mut seed, 0.3), layer(&mut seed, if wrt.is_empty() { 0.3 } else { 0.0 }));
    let x = random(TOKENS * FEATURES, &mut seed);

    let attend = |layer: &Layer| -> Result<Attended, Box<dyn std::error::Error>> {
        let [q, k, v] = layer.weights.each_ref().map(|w| product(&x, w, FEATURES, WIDTH));
        let (mut o, mut stats) = (vec![0f32; TOKENS * WIDTH], vec![0f32; TOKENS * HEADS]);
        let params = [Param::new("rate", &layer.rate)];
        if narrow {
            let [q, k, v] = [&q, &k, &v].map(|t| to_bf16(t));
            let mut out = to_bf16(&o);
            forward.prepared.forward(HostForward::new(&q, &k, &v, &mut out).stats(&mut stats).params(&params))?;
            o = out.iter().map(|x| x.to_f32()).collect();
        } else {
            forward.prepared.forward(HostForward::new(&q, &k, &v, &mut o).stats(&mut stats).params(&params))?;
        }
        Ok(([q, k, v], o, stats))
    };
    let (_, target, _) = attend(&teacher)?;

    let mut moments = Adam::new(&student);
    let mut first = None;
    let mut loss = 0.0;
    for step in 0..=STEPS {
        let ([q, k, v], o, stats) = attend(&student)?;
        let d_o: Vec<f32> = o.iter().zip(&target).map(|(o, t)| 2.0 * (o - t) / TOKENS as f32).collect();
        loss = o.iter().zip(&target).map(|(o, t)| (o - t).powi(2)).sum::<f32>() / o.len() as f32;
        first.get_or_insert(loss);
        if step % 25 == 0 {
            println!("step {step:3}: loss {loss:.6}, rates {:.2?}", student.rate);
        }
        let mut gradients: [Vec<f32>; 3] = std::array::from_fn(|_| vec![0f32; TOKENS * WIDTH]);
        let mut d_rate = vec![0f32; HEADS];
        let params = [Param::new("rate", &student.rate)];
        let [dq, dk, dv] = &mut gradients;
        if narrow {
            let [q, k, v, o, d_o] = [&q, &k, &v, &o, &d_o].map(|t| to_bf16(t));
            let [mut gq, mut gk, mut gv] = [&q, &k, &v].map(Vec::clone);
            backward.prepared.backward(HostBackward::new((&q, &k, &v), (&o, &stats), &d_o, (&mut gq, &mut gk, &mut gv)).params(&params))?;
            for (to, from) in [(dq, gq), (dk, gk), (dv, gv)] {
                *to = from.iter().map(|x| x.to_f32()).collect();
            }
        } else {
            let rate = HostGradient::new("rate", &mut d_rate);
            backward
                .prepared
                .backward(HostBackward::new((&q, &k, &v), (&o, &stats), &d_o, (dq, dk, dv)).params(&params).gradients([rate]))?;
        }
        let d_weights = gradients.each_ref().map(|g| transposed_product(&x, g, FEATURES, WIDTH));
        moments.step(&mut student, &d_weights, &d_rate);
    }
    let first = first.unwrap_or(loss);
    println!("the loss fell to {:.1} % of what it was", 100.0 * loss / first);
    if loss < 0.5 * first { Ok(()) } else { Err("the loss did not fall".into()) }
}

fn to_bf16(x: &[f32]) -> Vec<half::bf16> {
    x.iter().map(|&x| half::bf16::from_f32(x)).collect()
}

/// Adam (Kingma and Ba, 2015).
struct Adam {
    means: Vec<Vec<f32>>,
    squares: Vec<Vec<f32>>,
    steps: i32,
}

impl Adam {
    fn new(layer: &Layer) -> Adam {
        let zeros: Vec<Vec<f32>> = layer.weights.iter().chain([&layer.rate]).map(|w| vec![0.0; w.len()]).collect();
        Adam { means: zeros.clone(), squares: zeros, steps: 0 }
    }

    fn step(&mut self, layer: &mut Layer, d_weights: &[Vec<f32>; 3], d_rate: &Vec<f32>) {
        self.steps += 1;
        let corrections = [0.9f32, 0.999].map(|b| 1.0 - b.powi(self.steps));
        let parameters = layer.weights.iter_mut().chain([&mut layer.rate]);
        let state = self.means.iter_mut().zip(&mut self.squares);
        for ((w, g), (m, s)) in parameters.zip(d_weights.iter().chain([d_rate])).zip(state) {
            for (((w, g), m), s) in w.iter_mut().zip(g).zip(m).zip(s) {
                *m = 0.9 * *m + 0.1 * g;
                *s = 0.999 * *s + 0.001 * g * g;
                *w -= 0.02 * (*m / corrections[0]) / ((*s / corrections[1]).sqrt() + 1e-8);
            }
        }
    }
}
