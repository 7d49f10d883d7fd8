//! Kernels as those of NVIDIA GPUs: `device msl` runs them there; here a second compiler reads their sources.

use super::sources::plans;
use super::{option_rows, side_by_side, table_rows};
use conformance::msl::nvidia;
use conformance::nvrtc;
use conformance::say::{say, skip};
use std::collections::HashMap;
use std::sync::Mutex;

#[test]
fn another_compiler_takes_the_sources() {
    let nvrtc = match nvrtc::find() {
        Ok(nvrtc) => nvrtc,
        Err(why) => return skip("msl", &format!("compiling for NVIDIA GPUs: {why}")),
    };
    // Of each kernel one with and one without a sink: compilation takes seconds.
    let mut sources: HashMap<(&str, bool), metal_fallback::Plan> = HashMap::new();
    for plan in table_rows(false).iter().step_by(7).chain(&option_rows()).flat_map(plans) {
        sources.entry((plan.entry, plan.source.contains("#define WITH_SINK 1"))).or_insert(plan);
    }
    let few: Vec<_> = sources.into_values().collect();
    let bytes = Mutex::new(0);
    side_by_side(&few, |plan| *bytes.lock().unwrap() += nvidia::compile(&nvrtc, plan, "sm_90").unwrap().len());
    let mut wrong = few.iter().find(|plan| plan.source.contains("threadgroup_barrier(")).cloned().unwrap();
    wrong.source = wrong.source.replace("threadgroup_barrier(", "threadgroup_barriers(");
    let said = nvidia::compile(&nvrtc, &wrong, "sm_90").unwrap_err();
    assert!(said.contains("threadgroup_barriers"), "{said}");
    assert!(few.len() > 8, "only {} sources", few.len());
    say(&format!("NVRTC: {} sources make {} bytes for SM 9.0", few.len(), bytes.into_inner().unwrap()));
}
