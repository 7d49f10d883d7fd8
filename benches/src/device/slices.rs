//! `cudnn_graph`'s adapter for cudarc: a fused matrix product over slices of three streams, which cudarc's events order. The result is that of the
//! product in f64.

use crate::setup::Result;
use cudarc::driver::CudaContext;
use cudnn_graph::cudarc::{Call, Executable};
use cudnn_graph::ir::{Mode, Scalar};
use cudnn_graph::{DType, Graph, Library, Plan, Policy, Stream, Target};
use half::bf16;
use std::sync::Arc;

const ROWS: usize = 192;
const INNER: usize = 128;
const COLUMNS: usize = 320;
/// Views of the operands begin here: a multiple of 16 bytes.
const GAP: usize = 64;

/// Small integers, so that f32 sums of products are exact.
fn integers(count: usize, factor: usize) -> Vec<bf16> {
    (0..count).map(|n| bf16::from_f32((n * factor % 7) as f32 - 3.0)).collect()
}

pub(crate) fn run(library: &'static Library, planning: &Stream) -> Result<()> {
    let mut g = Graph::new();
    let a = g.input("a", DType::BF16, [1, ROWS as i64, INNER as i64]);
    let b = g.input("b", DType::BF16, [1, INNER as i64, COLUMNS as i64]);
    let k = g.parameter("k", DType::F32);
    let product = g.matmul(a, b);
    let y = g.pointwise(Mode::Mul, &[product, k]);
    g.output(y, "y", DType::F32);
    let target = Target::Handle(&library.handle(planning)?);
    let plan = Plan::build(library, Arc::new(g.verify()?), &target, &Policy::default())?;
    let mut executable = Some(Executable::new(Arc::new(plan)));

    let context = CudaContext::new(0)?;
    let (uploads, compute, downloads) = (context.new_stream()?, context.new_stream()?, context.new_stream()?);
    let (host_a, host_b) = (integers(GAP + ROWS * INNER, 5), integers(GAP + INNER * COLUMNS, 3));
    let mut y = uploads.clone_htod(&vec![f32::NAN; ROWS * COLUMNS])?;
    for factor in [2.0f32, -1.0] {
        let (of_a, of_b) = (uploads.clone_htod(&host_a)?, uploads.clone_htod(&host_b)?);
        let (of_a, of_b) = (of_a.slice(GAP..), of_b.slice(GAP..));
        let call = Call::new().input(a, &of_a).input("b", &of_b).value("k", Scalar::F32(factor)).output("y", &mut y);
        let Some(it) = &executable else { return Err("the executable was dropped".into()) };
        it.submit(&compute, call)?;
        if factor < 0.0 {
            // The plan must live until the device has finished it.
            executable = None;
        }
        let got = downloads.clone_dtoh(&y)?;
        for (n, got) in got.iter().enumerate() {
            let (row, column) = (n / COLUMNS, n % COLUMNS);
            let term = |i: usize| host_a[GAP + row * INNER + i].to_f64() * host_b[GAP + i * COLUMNS + column].to_f64();
            let want = f64::from(factor) * (0..INNER).map(term).sum::<f64>();
            if f64::from(*got) != want {
                return Err(format!("the adapter of cudnn-graph for cudarc is wrong: y[{row},{column}] is {got}, expected {want}").into());
            }
        }
    }
    println!("passed cudarc: a graph over slices of three streams, twice");
    Ok(())
}
