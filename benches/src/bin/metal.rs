//! Times attention on an Apple GPU by the GPU's own clock: forward, and the gradient. Prints a line of JSON about the device and one for
//! each row; `benches/mlx_sdpa.py` sets MLX beside them. `metal [--executor cpu] [--quick]`: `--quick` divides lengths by 16.

use conformance::random::Random;
use half::{bf16, f16};
use sdpa::{
    AttentionSpec, DType, Elements, ElementsMut, ExecutorName, HostBackward, HostForward, Layout, Prepared, PreparedBackward, Report, Shape,
};
use sdpa::{Dispatcher, Preference};
use serde::Serialize;
use std::error::Error;

const WARM: usize = 3;
const RUNS: usize = 15;

/// Types of elements.
#[derive(Clone, Copy)]
enum Type {
    F32,
    F16,
    Bf16,
}

impl Type {
    fn dtype(self) -> DType {
        match self {
            Type::F32 => DType::F32,
            Type::F16 => DType::F16,
            Type::Bf16 => DType::BF16,
        }
    }
}

/// Mask, type, and batch, heads_q, heads_kv, seq_q, seq_kv, dim.
type Row = (&'static str, Type, [i64; 6]);

const ROWS: [Row; 13] = [
    ("causal", Type::F16, [1, 32, 32, 1024, 1024, 64]),
    ("causal", Type::F16, [1, 32, 32, 2048, 2048, 64]),
    ("causal", Type::F16, [1, 32, 32, 4096, 4096, 64]),
    ("causal", Type::F16, [1, 32, 32, 2048, 2048, 96]),
    ("causal", Type::F16, [1, 32, 32, 2048, 2048, 128]),
    ("causal", Type::F16, [1, 32, 32, 4096, 4096, 128]),
    ("none", Type::F16, [1, 32, 32, 2048, 2048, 64]),
    ("none", Type::F16, [1, 32, 32, 2048, 2048, 128]),
    ("causal", Type::F16, [1, 32, 8, 2048, 2048, 128]),
    ("causal", Type::Bf16, [1, 32, 32, 2048, 2048, 64]),
    ("causal", Type::F32, [1, 32, 32, 2048, 2048, 64]),
    ("causal", Type::F16, [1, 16, 16, 2048, 2048, 256]),
    ("none", Type::F16, [1, 32, 8, 16, 4096, 128]),
];

#[derive(Serialize)]
struct Device {
    device: String,
    system: String,
    executor: &'static str,
}

#[derive(Serialize)]
struct Times {
    mask: &'static str,
    dtype: String,
    /// batch, heads_q, heads_kv, seq_q, seq_kv, dim.
    shape: [i64; 6],
    /// Medians.
    forward_ms: f64,
    backward_ms: f64,
    engines: [String; 2],
    /// Operands that went through a copy, which is not in the times.
    copied: Vec<&'static str>,
}

/// Elements that the executors take.
trait Element: Copy + Sized {
    const ZERO: Self;
    fn of(x: f32) -> Self;
    fn read(x: &[Self]) -> Elements<'_>;
    fn written(x: &mut [Self]) -> ElementsMut<'_>;
}

macro_rules! element {
    ($ty:ty, $variant:ident, $zero:expr, $of:expr) => {
        impl Element for $ty {
            const ZERO: Self = $zero;
            fn of(x: f32) -> Self {
                $of(x)
            }
            fn read(x: &[Self]) -> Elements<'_> {
                Elements::$variant(x)
            }
            fn written(x: &mut [Self]) -> ElementsMut<'_> {
                ElementsMut::$variant(x)
            }
        }
    };
}
element!(f32, F32, 0.0, |x| x);
element!(f16, F16, f16::ZERO, f16::from_f32);
element!(bf16, BF16, bf16::ZERO, bf16::from_f32);

fn median(mut run: impl FnMut() -> Result<Report, sdpa::Error>) -> Result<(f64, Report), sdpa::Error> {
    let mut last = Report::default();
    let mut times = Vec::with_capacity(RUNS);
    for n in 0..WARM + RUNS {
        last = run()?;
        if n >= WARM {
            times.push(last.compute.as_secs_f64() * 1e3);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok((times[RUNS / 2], last))
}

fn time<T: Element>(shape: Shape, forward: &dyn Prepared, backward: &dyn PreparedBackward) -> Result<[(f64, Report); 2], sdpa::Error> {
    let mut random = Random::new(1);
    let Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v } = shape;
    let mut normal = |n: i64| -> Vec<T> { (0..n).map(|_| T::of(random.normal() as f32)).collect() };
    let q = normal(batch * heads_q * seq_q * dim_qk);
    let [k, v] = [dim_qk, dim_v].map(|dim| normal(batch * heads_kv * seq_kv * dim));
    let d_o = normal(batch * heads_q * seq_q * dim_v);
    let mut o = vec![T::ZERO; d_o.len()];
    let mut stats = vec![0.0f32; (batch * heads_q * seq_q) as usize];
    let timed_forward =
        median(|| forward.forward(HostForward::new(T::read(&q), T::read(&k), T::read(&v), T::written(&mut o)).stats(&mut stats)))?;
    let [mut dq, mut dk, mut dv] = [q.len(), k.len(), v.len()].map(|n| vec![T::ZERO; n]);
    let timed_backward = median(|| {
        backward.backward(HostBackward::new(
            (T::read(&q), T::read(&k), T::read(&v)),
            (T::read(&o), &stats),
            T::read(&d_o),
            (T::written(&mut dq), T::written(&mut dk), T::written(&mut dv)),
        ))
    })?;
    Ok([timed_forward, timed_backward])
}

fn main() -> Result<(), Box<dyn Error>> {
    let (mut name, mut divisor) = (ExecutorName::METAL, 1);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => divisor = 16,
            "--executor" => {
                let given = arguments.next().unwrap_or_default();
                let found = Dispatcher::default().executors().into_iter().find(|executor| executor.name() == given);
                name = found.ok_or_else(|| format!("--executor {given:?}: one of cudnn, metal, cpu"))?;
            }
            other => return Err(format!("{other:?} is not known: metal [--executor NAME] [--quick]").into()),
        }
    }
    let dispatcher = Dispatcher::default();
    let told = match (name, dispatcher.metal().facts()) {
        (ExecutorName::METAL, Ok(facts)) => Device { device: facts.name.clone(), system: facts.system.clone(), executor: name.name() },
        _ => Device { device: name.name().to_owned(), system: std::env::consts::OS.to_owned(), executor: name.name() },
    };
    println!("{}", serde_json::to_string(&told)?);
    for (mask, ty, [batch, heads_q, heads_kv, seq_q, seq_kv, dim]) in ROWS {
        let [seq_q, seq_kv] = [seq_q, seq_kv].map(|seq: i64| (seq / divisor).max(1));
        let shape = Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk: dim, dim_v: dim };
        let mut spec = AttentionSpec::dense(ty.dtype(), shape, Layout::Bhsd).with_stats();
        if mask != "none" {
            spec = spec.mask(mask.parse()?);
        }
        let spec = spec.backward();
        let forward = dispatcher.prepare(&spec.forward.validate()?, Preference::Named(name))?.prepared;
        let backward = dispatcher.prepare_backward(&spec.validate()?, Preference::Named(name))?.prepared;
        let timed = match ty {
            Type::F32 => time::<f32>,
            Type::F16 => time::<f16>,
            Type::Bf16 => time::<bf16>,
        };
        let timed = timed(shape, &*forward, &*backward)?;
        let [(forward_ms, forward), (backward_ms, backward)] = timed;
        let mut copied = forward.copied;
        copied.extend(backward.copied);
        copied.sort_unstable();
        copied.dedup();
        let engines = [forward.engine, backward.engine];
        let shape = [batch, heads_q, heads_kv, seq_q, seq_kv, dim];
        println!(
            "{}",
            serde_json::to_string(&Times { mask, dtype: ty.dtype().to_string(), shape, forward_ms, backward_ms, engines, copied })?
        );
    }
    Ok(())
}
