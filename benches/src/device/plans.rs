//! Plans that travel: made for a profile as on a machine without a GPU, taken out as JSON, loaded on the device, executed, and
//! compared bit by bit with a plan made on the device.
#![allow(unsafe_code)]

use crate::setup::{Result, Tensors, executor};
use cudnn_graph::{DeviceProfile, Plan, Policy, Target};
use half::bf16;
use sdpa::cudnn::plan::ask;
use sdpa::cudnn::{PlanOptions, Planned};
use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};
use std::time::Instant;

pub(crate) fn run() -> Result<()> {
    let executor = executor(PlanOptions::default())?;
    let library = executor.library();
    let profile = DeviceProfile::of_device(library, executor.device())?;
    println!("profile read off the device: {profile}");
    let kept = DeviceProfile::from_json(include_str!("../../../cudnn-graph/devprops/h200.json"))?;
    if profile.name() == kept.name() && !profile.same_kernels(&kept) {
        return Err("cudnn-graph/devprops/h200.json is not this device any more".into());
    }
    let stream = executor.device().stream()?;
    let handle = library.handle(&stream)?;
    let shape = Shape { batch: 2, heads_q: 8, heads_kv: 2, seq_q: 300, seq_kv: 429, dim_qk: 128, dim_v: 64 };
    let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).with_stats().mask(Mask::causal_bottom_right());
    let problem = spec.validate()?;
    let (here, _) = executor.attention(&problem)?;
    let mut outputs = vec![output(&stream, &handle, &here, &spec)?];
    for (what, profile) in [("read off the device", &profile), ("from the file", &kept)] {
        let start = Instant::now();
        let (lowered, planner) = ask(library, &Target::Profile(profile), &here.job, here.lowered.form, &Policy::default())?;
        let json = planner.first(&Target::Profile(profile))?.to_json()?;
        let made = start.elapsed();
        let start = Instant::now();
        // SAFETY: the text is that of a plan of this graph.
        let plan = unsafe { Plan::from_json(library, &json, &lowered.graph, &Target::Handle(&handle)) }?;
        println!(
            "a plan for the profile {what}: made in {:.1} ms, {} bytes of JSON, loaded in {:.2} ms",
            made.as_secs_f64() * 1e3,
            json.len(),
            start.elapsed().as_secs_f64() * 1e3
        );
        let planned = Planned::of(library, &Target::Handle(&handle), &here.job, (lowered, plan.into()))?;
        outputs.push(output(&stream, &handle, &planned, &spec)?);
        let other = json.replacen("\"cudnnVersion\":9", "\"cudnnVersion\":8", 1);
        // SAFETY: as above, but for a number that is checked first.
        match unsafe { Plan::from_json(library, &other, &planned.lowered.graph, &Target::Handle(&handle)) } {
            Err(e) => println!("    of another runtime: {e}"),
            Ok(_) => return Err("a plan of another runtime was taken".into()),
        }
    }
    if outputs.iter().any(|o| o.iter().any(|x| x.is_nan())) {
        return Err("an element of the output was not written".into());
    }
    if outputs.iter().any(|o| *o != outputs[0]) {
        return Err("a plan from JSON computes something else".into());
    }
    println!("passed: {} outputs are the same, bit by bit", outputs.len());
    Ok(())
}

fn output(stream: &cudnn_graph::Stream, handle: &cudnn_graph::Handle, planned: &Planned, spec: &AttentionSpec) -> Result<Vec<bf16>> {
    let mut tensors = Tensors::new(stream, spec, planned.workspace_bytes(), 3)?;
    tensors.o().fill(stream, 0xff)?;
    // SAFETY: whole buffers of this device, waited for below.
    unsafe { planned.forward(handle, &tensors.call(None)) }?;
    let mut elements = vec![bf16::ZERO; tensors.o_bytes / 2];
    tensors.o().download(stream, 0, &mut elements)?;
    Ok(elements)
}
