//! The Metal kernels, compiled for NVIDIA GPUs.
use conformance::Case;
use conformance::msl::{nvidia, table};
use conformance::nvrtc::Nvrtc;
use metal_fallback::Plan;
use sdpa::exec::metal::{backward, forward};

fn plans(case: &Case) -> Vec<Plan> {
    let problem = case.spec().unwrap().validate().unwrap();
    let gradient = case.backward_spec().unwrap().validate().unwrap();
    let mut plans = vec![forward(&problem).plan().unwrap()];
    plans.extend(backward(&gradient).unwrap().plan().unwrap());
    plans
}

#[test]
fn kernels_compile() {
    let nvrtc = Nvrtc::find().unwrap();
    for case in table::cases(false).unwrap().iter().step_by(20) {
        for plan in plans(case) {
            let start = std::time::Instant::now();
            let code = nvidia::compile(&nvrtc, &plan, "sm_90").unwrap();
            println!("{} {} {} bytes {:?}", case.name, plan.entry, code.len(), start.elapsed());
        }
    }
}
