//! A fused kernel other than attention: `y = gelu(a · b + bias)`, built with the typed builder.
//!
//! With a GPU it runs, and the result is compared with the interpreter, which defines every op. Without one it builds the plan, including its kernel,
//! for a device profile: `matmul_bias_gelu cudnn-graph/devprops/h200.json`.

use cudnn_graph::ir::interp::{self, Precision, Value};
use cudnn_graph::ir::{Mode, TensorId};
use cudnn_graph::{Buffer, DType, DeviceProfile, Driver, Graph, Library, OwnedBindings, Plan, Policy, Search, Target, Verified, launch};
use half::bf16;
use std::collections::BTreeMap;
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

const M: i64 = 300;
const K: i64 = 136;
const N: i64 = 520;

struct Fused {
    graph: Arc<Verified>,
    a: TensorId,
    b: TensorId,
    bias: TensorId,
    y: TensorId,
}

fn fused() -> Result<Fused, Box<dyn Error>> {
    let mut g = Graph::new();
    let a = g.input("a", DType::BF16, [1, M, K]);
    let b = g.input("b", DType::BF16, [1, K, N]);
    let bias = g.input("bias", DType::BF16, [1, 1, N]);
    let product = g.matmul(a, b);
    let sum = g.pointwise(Mode::Add, &[product, bias]);
    let y = g.pointwise(Mode::GeluFwd, &[sum]);
    g.output(y, "y", DType::BF16);
    Ok(Fused { graph: Arc::new(g.verify()?), a, b, bias, y })
}

/// Returns numbers between -1 and 1 that bf16 represents exactly.
fn numbers(count: i64, seed: u32) -> Vec<bf16> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32((state >> 24) as f32 / 128.0 - 1.0)
    };
    (0..count).map(|_| next()).collect()
}

fn main() -> ExitCode {
    plan_or_run().map_or_else(
        |error| {
            eprintln!("matmul_bias_gelu: {error}");
            ExitCode::FAILURE
        },
        |()| ExitCode::SUCCESS,
    )
}

fn plan_or_run() -> Result<(), Box<dyn Error>> {
    let fused = fused()?;
    println!("{}", fused.graph.graph());
    let library = Library::load(&Search::default())?;
    println!("cuDNN {} from {}", library.version(), library.path().display());
    match std::env::args().nth(1) {
        Some(file) => plan_only(library, &fused, &DeviceProfile::from_json(&std::fs::read_to_string(file)?)?),
        None => run(library, &fused),
    }
}

fn plan_only(library: &'static Library, fused: &Fused, profile: &DeviceProfile) -> Result<(), Box<dyn Error>> {
    let plan = Plan::build(library, fused.graph.clone(), &Target::Profile(profile), &Policy::default())?;
    println!("a plan for {} (sm {}):\n{}", profile.name(), profile.sm(), plan.report());
    println!("workspace {} bytes, JSON {} bytes", plan.workspace_bytes(), plan.to_json()?.len());
    Ok(())
}

fn run(library: &'static Library, fused: &Fused) -> Result<(), Box<dyn Error>> {
    let device = Driver::load(None)?.device(0)?;
    let stream = Arc::new(device.stream()?);
    let plan = {
        let handle = library.handle(&stream)?;
        Arc::new(Plan::build(library, fused.graph.clone(), &Target::Handle(&handle), &Policy::default())?)
    };
    println!("a plan for {}:\n{}", device.name(), plan.report());

    let inputs = [(fused.a, numbers(M * K, 1), [1, M, K]), (fused.b, numbers(K * N, 2), [1, K, N]), (fused.bias, numbers(N, 3), [1, 1, N])];
    let mut bindings = OwnedBindings::new();
    let mut values = BTreeMap::new();
    for (id, data, dims) in &inputs {
        let mut buffer = Buffer::new(device, data.len() * 2)?;
        buffer.upload(&stream, 0, data)?;
        bindings = bindings.buffer(*id, &Arc::new(buffer));
        values.insert(*id, Value { dims: dims.to_vec(), data: data.iter().map(|x| x.to_f64()).collect() });
    }
    let mut y = Buffer::new(device, (M * N) as usize * 2)?;
    y.fill(&stream, 0xff)?;
    let y = Arc::new(y);
    let workspace = Buffer::new(device, plan.workspace_bytes() as usize)?;
    launch(&plan, &stream, bindings.buffer(fused.y, &y), workspace)?.wait()?;
    let mut got = vec![bf16::ZERO; (M * N) as usize];
    y.download(&stream, 0, &mut got)?;

    let want = interp::run(&fused.graph, &values, Precision::F64)?;
    let want = &want[&fused.y].data;
    // Allow for an f32 sum of K products, for gelu's derivative of at most 1.13, and for one rounding to bf16.
    let tolerance = |x: f64| x.abs() / 256.0 + 1.13 * 4.0 * (K as f64).sqrt() * K as f64 / f64::from(1 << 24);
    let worst = got
        .iter()
        .zip(want)
        .map(|(g, w)| (g.to_f64() - w).abs() / tolerance(*w))
        .fold(0.0, |a: f64, b| if b.is_nan() { f64::INFINITY } else { a.max(b) });
    println!("worst error: {worst:.2} of the tolerance, over {} elements", got.len());
    if worst <= 1.0 { Ok(()) } else { Err("wrong result".into()) }
}
