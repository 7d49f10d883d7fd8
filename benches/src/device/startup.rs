//! Time to the first output of a fresh process, by part: `device startup [PLANS]`, with the plan from that file where there is one; a file
//! that is not there is made first, by a process that then ends.
#![allow(unsafe_code)]

use crate::setup::{Result, Tensors, problems};
use cudnn_graph::{Driver, Library, Search};
use sdpa::cudnn::{CudnnExecutor, CudnnOptions};
use std::time::Instant;

pub(crate) fn run(plans: Option<&str>) -> Result<()> {
    let (name, spec) = problems().swap_remove(0);
    let problem = spec.validate()?;
    if let Some(path) = plans.filter(|path| !std::path::Path::new(path).exists()) {
        let executor = CudnnExecutor::new(CudnnOptions::default())?;
        executor.attention(&problem)?;
        println!("{} plan saved into {path}", executor.save(path)?);
        return Ok(());
    }
    let start = Instant::now();
    let mut before = 0.0;
    let mut part = |what: &str| {
        let now = start.elapsed().as_secs_f64() * 1e3;
        println!("    {:8.1} ms  {what}", now - before);
        before = now;
    };
    println!("{name}, fresh process:");
    let device = Driver::load(None)?.device(0)?;
    part("driver and context");
    let library = Library::load(&Search::default())?;
    part("cuDNN's libraries");
    let stream = device.stream()?;
    let handle = library.handle(&stream)?;
    part("handle");
    let executor = CudnnExecutor::new(CudnnOptions::default())?;
    if let Some(path) = plans {
        executor.attach(path)?;
        part("executor, plan file");
    }
    let (planned, _) = executor.attention(&problem)?;
    match (plans, !planned.time.load.is_zero()) {
        (None, _) => part("plan: graph, heuristics, compilation"),
        (Some(_), true) => part("plan: from the file"),
        (Some(path), false) => return Err(format!("the plan was compiled, although {path} has one").into()),
    }
    let mut tensors = Tensors::new(&stream, &spec, planned.workspace_bytes(), 1)?;
    tensors.o().fill(&stream, 0xff)?;
    stream.synchronize()?;
    part("inputs");
    // SAFETY: the tensors are whole buffers of this device; the stream is waited for.
    unsafe { planned.forward(&handle, &tensors.call(None)) }?;
    stream.synchronize()?;
    part("first execution");
    // SAFETY: as above.
    unsafe { planned.forward(&handle, &tensors.call(None)) }?;
    stream.synchronize()?;
    part("second execution");
    println!("    {:8.1} ms  in all", start.elapsed().as_secs_f64() * 1e3);
    Ok(())
}
