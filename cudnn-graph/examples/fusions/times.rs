//! Device times and results of the large fusions: a JSON object a line in, one a line out. `{"fusion": "layer_norm", "calls": 20}` asks for the mean
//! time of so many calls, and `{"fusion": "layer_norm", "save": "folder"}` for the bytes of its inputs and results in files. With `"dynamic": true` the plan
//! has dynamic shapes; without such an engine the answer is `{"error": …}`.
#![allow(unsafe_code)]

use super::{graphs, numbers, upload};
use cudnn_graph::ir::Storage;
use cudnn_graph::{
    Bindings, Buffer, Device, DeviceSlice, Error as GraphError, Event, Graph, Library, Plan, Planner, Policy, Stream, Target, Trial,
};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const CALLS: u32 = 10;
/// Plans with other results than the first one are not chosen. Results are rounded to bf16, and sums are as large as a few thousand.
const TOLERANCE: f64 = 0.02;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    fusion: String,
    #[serde(default)]
    calls: u32,
    #[serde(default)]
    save: Option<PathBuf>,
    #[serde(default)]
    dynamic: bool,
}

/// The fastest plan of a fusion, with its memory.
struct Ready {
    plan: Plan,
    stream: Arc<Stream>,
    /// The name of each tensor in memory, and whether the fusion writes it.
    buffers: Vec<(String, bool, Buffer)>,
    bindings: Bindings,
    workspace: Buffer,
}

fn slice(buffer: &Buffer) -> DeviceSlice {
    DeviceSlice { address: buffer.address(), bytes: buffer.bytes() as u64 }
}

/// Executes a plan several times, and returns the mean time in seconds.
fn timed(
    library: &'static Library,
    stream: &Arc<Stream>,
    plan: &Plan,
    bindings: &Bindings,
    workspace: &Buffer,
    calls: u32,
) -> Result<f64, GraphError> {
    let handle = library.handle(stream)?;
    let [start, end] = [Event::new(stream.device(), true)?, Event::new(stream.device(), true)?];
    stream.record_again(&start)?;
    for _ in 0..calls {
        // SAFETY: every slice is a buffer that lives until the stream is done, and one execution follows another.
        unsafe { plan.execute(&handle, bindings, slice(workspace))? };
    }
    stream.record_again(&end)?;
    stream.synchronize()?;
    Ok(f64::from(end.since(&start)?) / 1e3 / f64::from(calls))
}

fn ready(library: &'static Library, device: &'static Device, name: &str, dynamic: bool) -> Result<Ready, Box<dyn Error>> {
    let &(_, build) = graphs::FUSIONS.iter().find(|(fusion, _)| *fusion == name).ok_or_else(|| format!("there is no fusion {name:?}"))?;
    let mut g = Graph::new();
    build(&mut g, &graphs::LARGE);
    let graph = Arc::new(g.verify()?);
    let stream = Arc::new(device.stream()?);
    let written: BTreeSet<_> = graph.ops().iter().flat_map(|op| op.operands().outputs).map(|o| o.tensor).collect();
    let (mut buffers, mut bindings) = (Vec::new(), Bindings::new());
    for (id, tensor) in graph.ids().zip(graph.tensors()).filter(|(_, tensor)| tensor.storage == Storage::Device) {
        let mut buffer = Buffer::new(device, tensor.bytes().unwrap_or(0) as usize)?;
        if written.contains(&id) {
            buffer.fill(&stream, 0xff)?;
        } else {
            upload(&mut buffer, &stream, tensor, &numbers(tensor, id.index() as u32))?;
        }
        bindings = bindings.slice(id, slice(&buffer));
        buffers.push((tensor.name.clone(), written.contains(&id), buffer));
    }
    let handle = library.handle(&stream)?;
    let target = Target::Handle(&handle);
    let planner = Planner::new(library, graph.clone(), &target, &Policy::default().with_dynamic_shapes(dynamic))?;
    let trial = |plan: &Plan| -> Result<Trial, GraphError> {
        let workspace = Buffer::new(device, plan.workspace_bytes() as usize)?;
        timed(library, &stream, plan, &bindings, &workspace, 2)?;
        let time = Duration::from_secs_f64(timed(library, &stream, plan, &bindings, &workspace, CALLS)?);
        let mut results = Vec::new();
        for (id, (_, _, buffer)) in graph.ids().filter(|id| graph.get(*id).is_some_and(|t| t.storage == Storage::Device)).zip(&buffers) {
            let Some(tensor) = graph.get(id).filter(|_| written.contains(&id)) else { continue };
            let all = super::download(buffer, &stream, tensor).map_err(|e| GraphError::PlanJson(e.to_string()))?;
            results.extend(all.into_iter().step_by(97));
        }
        Ok(Trial { time, results })
    };
    let plan = planner.fastest(&target, TOLERANCE, trial)?;
    drop(handle);
    let workspace = Buffer::new(device, plan.workspace_bytes() as usize)?;
    Ok(Ready { plan, stream, buffers, bindings, workspace })
}

fn save(ready: &Ready, folder: &Path) -> Result<(), Box<dyn Error>> {
    std::fs::create_dir_all(folder)?;
    for (name, written, buffer) in &ready.buffers {
        let mut bytes = vec![0u8; buffer.bytes()];
        buffer.download(&ready.stream, 0, &mut bytes)?;
        // Results are named after the op; a fusion has one that its caller named.
        std::fs::write(folder.join(format!("{}{name}.bin", if *written { "out." } else { "" })), bytes)?;
    }
    Ok(())
}

pub(crate) fn run(library: &'static Library, device: &'static Device) -> Result<(), Box<dyn Error>> {
    let mut plans: BTreeMap<(String, bool), Ready> = BTreeMap::new();
    for line in std::io::stdin().lock().lines() {
        let question: Question = serde_json::from_str(&line?)?;
        let key = (question.fusion.clone(), question.dynamic);
        if !plans.contains_key(&key) {
            // Only those of one fusion at a time, for the memory.
            plans.retain(|(fusion, _), _| *fusion == question.fusion);
            match ready(library, device, &question.fusion, question.dynamic) {
                Ok(ready) => plans.insert(key.clone(), ready),
                Err(e) if question.dynamic => {
                    println!("{}", serde_json::json!({"error": e.to_string()}));
                    continue;
                }
                Err(e) => return Err(e),
            };
        }
        let Some(ready) = plans.get(&key) else { continue };
        let calls = question.calls.max(1);
        let us = 1e6 * timed(library, &ready.stream, &ready.plan, &ready.bindings, &ready.workspace, calls)?;
        if let Some(folder) = &question.save {
            save(ready, folder)?;
        }
        let engine = ready.plan.engine().map_or_else(String::new, |engine| engine.tag());
        println!("{}", serde_json::json!({"fusion": question.fusion, "us": us, "engine": engine}));
    }
    Ok(())
}
