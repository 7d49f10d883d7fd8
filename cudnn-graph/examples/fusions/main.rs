//! Fusions that cuDNN supports: `fusions` runs them on a GPU and compares the results with the interpreter; `fusions PROFILE.json` plans them for a
//! device that need not be present, such as `cudnn-graph/devprops/h200.json`. `fusions --times` answers questions of `benches/fusions.py` about time.

mod graphs;
mod times;

use cudnn_graph::ir::interp::{self, Precision, Value};
use cudnn_graph::ir::{Storage, Tensor};
use cudnn_graph::{
    Buffer, DType, Device, DeviceProfile, Driver, Error as GraphError, Graph, Library, OwnedBindings, Plan, Planner, Policy, Search,
    Stream, Target, Verified, launch,
};
use half::{bf16, f16};
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> ExitCode {
    run_all().map_or_else(
        |error| {
            eprintln!("fusions: {error}");
            ExitCode::FAILURE
        },
        |()| ExitCode::SUCCESS,
    )
}

fn run_all() -> Result<(), Box<dyn Error>> {
    let library = Library::load(&Search::default())?;
    if std::env::args().nth(1).is_some_and(|mode| mode == "--times") {
        return times::run(library, Driver::load(None)?.device(0)?);
    }
    println!("cuDNN {} from {}", library.version(), library.path().display());
    let profile = std::env::args().nth(1).map(|file| -> Result<DeviceProfile, Box<dyn Error>> {
        let text = std::fs::read_to_string(&file)
            .map_err(|e| format!("{file}: {e}; expected a device profile, such as cudnn-graph/devprops/h200.json"))?;
        Ok(DeviceProfile::from_json(&text)?)
    });
    let device = if profile.is_none() { Some(Driver::load(None)?.device(0)?) } else { None };
    let profile = profile.transpose()?;
    for (name, build) in graphs::FUSIONS {
        let mut g = Graph::new();
        build(&mut g, &graphs::SMALL);
        let graph = Arc::new(g.verify()?);
        match (&profile, device) {
            (Some(profile), _) => println!("{name}: {}", plan(library, &graph, profile)?),
            (None, Some(device)) => println!("{name}: worst error {:.2} of the tolerance", run(library, device, &graph)?),
            (None, None) => {}
        }
    }
    Ok(())
}

fn plan(library: &'static Library, graph: &Arc<Verified>, profile: &DeviceProfile) -> Result<String, Box<dyn Error>> {
    let target = Target::Profile(profile);
    let planner = Planner::new(library, graph.clone(), &target, &Policy::default())?;
    match planner.first(&target) {
        Ok(plan) => {
            let engine = plan.report().chosen().map_or_else(String::new, |candidate| candidate.tag());
            Ok(format!("a plan for {} with engine {engine}, {} bytes of workspace", profile.name(), plan.workspace_bytes()))
        }
        // Some engines load their kernel here, which needs the device.
        Err(GraphError::Cudnn { status, .. }) if status.is_execution() => {
            Ok(format!("{} engine configurations for {}; the plan needs the device", planner.report().candidates.len(), profile.name()))
        }
        Err(e) => Err(e.into()),
    }
}

/// Executes a graph on random inputs. Returns the largest error of a result, in tolerances.
fn run(library: &'static Library, device: &'static Device, graph: &Arc<Verified>) -> Result<f64, Box<dyn Error>> {
    let stream = Arc::new(device.stream()?);
    let plan = {
        let handle = library.handle(&stream)?;
        Arc::new(Plan::build(library, graph.clone(), &Target::Handle(&handle), &Policy::default())?)
    };
    let written: BTreeSet<_> = graph.ops().iter().flat_map(|op| op.operands().outputs).map(|o| o.tensor).collect();
    let (mut values, mut bindings, mut results) = (BTreeMap::new(), OwnedBindings::new(), Vec::new());
    for (id, tensor) in graph.ids().zip(graph.tensors()).filter(|(_, tensor)| tensor.storage == Storage::Device) {
        let mut buffer = Buffer::new(device, tensor.bytes().unwrap_or(0) as usize)?;
        if written.contains(&id) {
            // NaNs, so that elements that are not written are found.
            buffer.fill(&stream, 0xff)?;
            let buffer = Arc::new(buffer);
            bindings = bindings.buffer(id, &buffer);
            results.push((id, buffer));
        } else {
            let value = numbers(tensor, id.index() as u32);
            upload(&mut buffer, &stream, tensor, &value)?;
            bindings = bindings.buffer(id, &Arc::new(buffer));
            values.insert(id, value);
        }
    }
    let workspace = Buffer::new(device, plan.workspace_bytes() as usize)?;
    launch(&plan, &stream, bindings, workspace)?.wait()?;
    let want = interp::run(graph, &values, Precision::F64)?;
    let mut worst = 0.0f64;
    for (id, buffer) in results {
        let (tensor, want) = (&graph.tensors()[id.index()], &want[&id]);
        let got = download(&buffer, &stream, tensor)?;
        // Allow for one rounding to the type of the result, and for f32 sums of a few thousand terms near 1.
        let rounding = if tensor.dtype == DType::F32 { 0.0 } else { 1.0 / 256.0 };
        let errors = got.iter().zip(&want.data).map(|(got, want)| (got - want).abs() / (rounding * want.abs() + 2e-3));
        worst = errors.fold(worst, |worst, error| if error.is_nan() { f64::INFINITY } else { worst.max(error) });
    }
    if worst <= 1.0 { Ok(worst) } else { Err(format!("wrong result: error {worst} of the tolerance\n{}", graph.graph()).into()) }
}

/// Returns multiples of 1/128 from -1 to 1, which bf16 represents exactly.
fn numbers(tensor: &Tensor, seed: u32) -> Value {
    let mut state = seed.wrapping_mul(2_654_435_761);
    let n = tensor.dims.elements().unwrap_or(0);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(state >> 24) / 128.0 - 1.0
    };
    Value::new(tensor.dims.0.clone(), (0..n).map(next).collect::<Vec<_>>())
}

/// Returns the index in memory of each element, row-major.
fn places(tensor: &Tensor) -> Vec<usize> {
    let axes = tensor.dims.0.iter().zip(&tensor.strides.0);
    axes.fold(vec![0], |places, (&n, &stride)| places.iter().flat_map(|at| (0..n).map(move |i| at + (i * stride) as usize)).collect())
}

fn upload(buffer: &mut Buffer, stream: &Stream, tensor: &Tensor, value: &Value) -> Result<(), Box<dyn Error>> {
    let width = tensor.dtype.bits() as usize / 8;
    let mut bytes = vec![0u8; tensor.bytes().unwrap_or(0) as usize];
    for (at, &x) in places(tensor).into_iter().zip(&value.data) {
        let element = &mut bytes[at * width..(at + 1) * width];
        match tensor.dtype {
            DType::F32 => element.copy_from_slice(&(x as f32).to_ne_bytes()),
            DType::F16 => element.copy_from_slice(&f16::from_f64(x).to_ne_bytes()),
            DType::BF16 => element.copy_from_slice(&bf16::from_f64(x).to_ne_bytes()),
            other @ (DType::F64
            | DType::I8
            | DType::U8
            | DType::I32
            | DType::I64
            | DType::Bool
            | DType::F8E4M3
            | DType::F8E5M2
            | DType::F8E8M0
            | DType::F4E2M1
            | DType::I4
            | DType::U4) => return Err(format!("this example has no inputs of type {other}").into()),
        }
    }
    Ok(buffer.upload(stream, 0, &bytes)?)
}

fn download(buffer: &Buffer, stream: &Stream, tensor: &Tensor) -> Result<Vec<f64>, Box<dyn Error>> {
    let width = tensor.dtype.bits() as usize / 8;
    let mut bytes = vec![0u8; tensor.bytes().unwrap_or(0) as usize];
    buffer.download(stream, 0, &mut bytes)?;
    let two = |at: usize| [bytes[at], bytes[at + 1]];
    let one = |at: usize| match width {
        4 => f64::from(f32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])),
        _ if tensor.dtype == DType::F16 => f16::from_ne_bytes(two(at)).to_f64(),
        _ => bf16::from_ne_bytes(two(at)).to_f64(),
    };
    Ok(places(tensor).into_iter().map(|at| one(at * width)).collect())
}
