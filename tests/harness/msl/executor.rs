//! The emulation as an executor, so that it answers to the cases of all of them.

use super::build::{Job, Program, Toolchain};
use metal_fallback::{Operand, Plan};
use sdpa::exec::metal::{forward, unsupported};
use sdpa::exec::{Executor, Prepared, PreparedBackward};
use sdpa::{
    BackwardProblem, Elements, ElementsMut, Error, ExecutorName, HostForward, ParamValue, Problem, Reason, Report, SpecError, SpecErrors,
    Unsupported,
};
use std::sync::Arc;
use std::time::Instant;

/// Metal kernels, emulated.
#[derive(Clone, Debug)]
pub struct Emulated {
    toolchain: Toolchain,
    seed: u64,
}

impl Emulated {
    /// With a seed of the order in which threadgroups and simdgroups run.
    pub fn new(toolchain: Toolchain, seed: u64) -> Emulated {
        Emulated { toolchain, seed }
    }
}

#[derive(Debug)]
struct EmulatedPlan {
    problem: Problem,
    plan: Plan,
    program: Program,
    seed: u64,
}

/// A fault of the emulation or of a kernel, as the environment's.
fn fault(what: &str, how: String) -> Error {
    Error::Spec(SpecErrors(vec![SpecError::new(what, how, "runs on the emulation")]))
}

fn no_backward() -> Unsupported {
    let reason = Reason::Absent("no backward kernel for Metal is written yet".to_owned());
    Unsupported { executor: ExecutorName::Metal, reasons: vec![reason] }
}

impl Executor for Emulated {
    fn name(&self) -> ExecutorName {
        ExecutorName::Metal
    }

    fn supports(&self, problem: &Problem) -> Result<(), Unsupported> {
        forward(problem).supports().map_err(unsupported)
    }

    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, Error> {
        let plan = forward(problem).plan().map_err(unsupported)?;
        let program = self.toolchain.program(&plan).map_err(|e| fault("kernel", e))?;
        Ok(Arc::new(EmulatedPlan { problem: problem.clone(), plan, program, seed: self.seed }))
    }

    fn supports_backward(&self, _problem: &BackwardProblem) -> Result<(), Unsupported> {
        Err(no_backward())
    }

    fn prepare_backward(&self, _problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error> {
        Err(no_backward().into())
    }
}

fn bytes<T: Copy, const N: usize>(elements: &[T], of: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    elements.iter().flat_map(|&x| of(x)).collect()
}

fn element_bytes(elements: &Elements<'_>) -> Vec<u8> {
    match elements {
        Elements::F32(x) => bytes(x, f32::to_le_bytes),
        Elements::F16(x) => bytes(x, half::f16::to_le_bytes),
        Elements::BF16(x) => bytes(x, half::bf16::to_le_bytes),
    }
}

fn param_bytes(value: &ParamValue<'_>) -> Vec<u8> {
    match value {
        ParamValue::Scalar(x) => x.to_le_bytes().to_vec(),
        ParamValue::F32(x) => bytes(x, f32::to_le_bytes),
        ParamValue::F16(x) => bytes(x, half::f16::to_le_bytes),
        ParamValue::BF16(x) => bytes(x, half::bf16::to_le_bytes),
        ParamValue::I32(x) => bytes(x, i32::to_le_bytes),
        ParamValue::Bool(x) => x.iter().map(|&x| u8::from(x)).collect(),
    }
}

fn contents(o: &ElementsMut<'_>) -> Vec<u8> {
    element_bytes(&match o {
        ElementsMut::F32(x) => Elements::F32(x),
        ElementsMut::F16(x) => Elements::F16(x),
        ElementsMut::BF16(x) => Elements::BF16(x),
    })
}

/// Takes back what a kernel wrote.
fn read_back(o: &mut ElementsMut<'_>, written: &[u8]) {
    fn all<T, const N: usize>(to: &mut [T], written: &[u8], of: impl Fn([u8; N]) -> T) {
        let (chunks, _) = written.as_chunks::<N>();
        to.iter_mut().zip(chunks).for_each(|(x, chunk)| *x = of(*chunk));
    }
    match o {
        ElementsMut::F32(x) => all(x, written, f32::from_le_bytes),
        ElementsMut::F16(x) => all(x, written, half::f16::from_le_bytes),
        ElementsMut::BF16(x) => all(x, written, half::bf16::from_le_bytes),
    }
}

impl Prepared for EmulatedPlan {
    fn forward(&self, call: HostForward<'_>) -> Result<Report, Error> {
        let started = Instant::now();
        let scale = call.check(&self.problem)?;
        let values = self.problem.bind(call.params)?;
        let HostForward { q, k, v, mut o, mut stats, .. } = call;
        let param = |name: &str| {
            let place = self.problem.params().iter().position(|p| p.name == name);
            place.and_then(|n| values.get(n)).map(param_bytes).unwrap_or_default()
        };
        let buffers: Vec<Vec<u8>> = self
            .plan
            .buffers
            .iter()
            .map(|binding| match &binding.operand {
                Operand::Q => element_bytes(&q),
                Operand::K => element_bytes(&k),
                Operand::V => element_bytes(&v),
                Operand::O => contents(&o),
                Operand::Params => self.plan.params(scale).bytes(),
                Operand::Stats => stats.as_deref().map(|s| bytes(s, f32::to_le_bytes)).unwrap_or_default(),
                Operand::SeqLenQ => param(sdpa::mask::SEQ_LEN_Q),
                Operand::SeqLenKv => param(sdpa::mask::SEQ_LEN_KV),
                Operand::Scalars(names) => names.iter().flat_map(|name| param(name)).collect(),
                Operand::Declared { name, dtype: _, elements: _ } => param(name),
            })
            .collect();
        let job = Job { plan: &self.plan, buffers: &buffers, seed: self.seed };
        for (operand, written) in self.program.run(&job).map_err(|e| fault("dispatch", e))? {
            match (operand, stats.as_deref_mut()) {
                (Operand::Stats, Some(stats)) => read_back(&mut ElementsMut::F32(stats), &written),
                (_, _) => read_back(&mut o, &written),
            }
        }
        let tiles = self.plan.tiles;
        let engine = format!("emulated {} x {}, {} threads", tiles.block_q, tiles.block_k, self.plan.threads);
        Ok(Report { compute_ms: started.elapsed().as_secs_f64() * 1e3, copied: Vec::new(), engine, workspace_bytes: 0 })
    }
}
